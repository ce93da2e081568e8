"""Tools for the first hour with an NPU, and for work without one: doctor, selftest, offline toolchain."""
