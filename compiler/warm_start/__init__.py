"""Programs kept between processes: a second start skips tracing, the passes and the self-check."""
