"""Tools for first use of an NPU, and for work without one: doctor, selftest, offline toolchain."""
