"""Groups of processes that run one program together."""
