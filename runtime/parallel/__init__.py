"""A group of processes that runs one program: rank 0 leads, the others follow, and they fail as one."""
