"""Advice to the system about memory: pages to make huge or take back, and what to keep that was freed.

Pages of big tensors are made huge, as decoding reads the whole KV cache and address translation of 4 KiB pages costs
about a third of the memory bandwidth. A step allocates tens of MB for the results of its operators and frees them
again; glibc gives such memory back to the system, which has to clear every page of it when it is wanted next: 3 to
5 % of the time of a prefill.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import mmap
import os
from collections.abc import Callable

import torch

KEPT_BYTES = 512 << 20
"""Free memory at the end of the heap that stays with the process, and the size of what is not taken from there."""

_SHARE_OF_DEVICE = 0.9
"""Of an NPU's free memory, by default for the KV cache; the rest is for the tensors of steps."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14


def free_device_memory(device: torch.device) -> int:
    """Default bytes of an NPU for the KV cache."""
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(_SHARE_OF_DEVICE * free)


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Mark the storage of a CPU tensor for transparent huge pages; call it before the first access to the memory.

    Returns:
        Whether the system took the advice; False on systems without ``madvise`` and for other devices.
    """
    advise = madvise()
    if advise is None or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return _advise_pages(advise, storage.data_ptr(), storage.data_ptr() + storage.nbytes(), _MADV_HUGEPAGE)


def discard_pages(tensor: torch.Tensor) -> bool:
    """Give the memory under a dense CPU tensor back; it reads as zeros until it is written again.

    Returns:
        Whether the system took the advice; False on systems without ``madvise``, for other devices, and for tensors
        with gaps or of less than a page.
    """
    advise = madvise()
    if advise is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return _advise_pages(advise, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, _MADV_DONTNEED)


def _advise_pages(advise: Callable[[int, int, int], int], begin: int, end: int, advice: int) -> bool:
    """Advise on the whole pages between two addresses."""
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    return last > first and advise(first, last - first, advice) == 0


@functools.cache
def madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    function = library.madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


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


def give_back_freed_memory() -> bool:
    """Give what was freed back to the system, holes within the heap included.

    Returns:
        Whether the C library did; False for others than glibc.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return bool(trim(0) == 1)
