"""What the C library does with memory that is freed.

A step allocates tens of MB for the results of its operators and frees them again. glibc gives such memory back to the
system, which has to clear every page of it when it is wanted next: 3 to 5 % of the time of a prefill.
"""

from __future__ import annotations

import ctypes
import functools
import os

KEPT_BYTES = 512 << 20
"""Free memory at the end of the heap that stays with the process, and the size of what is not taken from there."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep up to ``KEPT_BYTES`` of freed memory for the next step, from now on.

    Returns:
        Whether the C library took the advice. False for others than glibc, and where the environment says how
        ``malloc`` is to behave.
    """
    if any(name in os.environ for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return all([mallopt(name, KEPT_BYTES) == 1 for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)])
