"""What the kernel is told about the pages of big tensors: to make them huge, as decoding reads the whole KV cache and
address translation of 4 KiB pages costs about a third of the memory bandwidth; and to take back those that nobody
needs.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import mmap
from collections.abc import Callable

import torch

_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Mark the storage of a CPU tensor for transparent huge pages; call it before the memory is first touched.

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
