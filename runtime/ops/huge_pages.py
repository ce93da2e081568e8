"""Asks the kernel for huge pages under big tensors: decoding reads the whole KV cache, and address translation
of 4 KiB pages costs about a third of the memory bandwidth."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import mmap
from collections.abc import Callable

import torch

_MADV_HUGEPAGE = 14


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Mark the storage of a CPU tensor for transparent huge pages; call it before the memory is first touched.

    Returns:
        Whether the system took the advice; False on systems without ``madvise`` and for other devices.
    """
    advise = madvise()
    if advise is None or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    return end > begin and advise(begin, end - begin, _MADV_HUGEPAGE) == 0


@functools.cache
def madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    function = library.madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
