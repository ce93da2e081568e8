"""Give back the memory of weights that were mapped from a file, once their values are held elsewhere.

Checkpoints are mapped, not read: a weight's pages stay resident after the weight has moved, as long as another one
of the same file is in use. Pages that were never written to can be dropped at any time; whoever reads them again gets
the file's bytes.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

from ...runtime.memory import madvise
from ...runtime.ops.linear.stored_weight import StoredWeight, stored_parts

_DONTNEED = 4
_SMAPS = Path("/proc/self/smaps")


class FilePages:
    """The parts of this process's memory that mirror a file and were not written to when this was made.

    Args:
        tensors: those whose memory is to be dropped; nobody may write to them meanwhile. Memory that torch itself
            allocated needs no looking after, and systems that do not tell have nothing to drop.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        if madvise() is None or not _SMAPS.exists() or not any(_is_foreign(tensor) for tensor in tensors):
            return
        begin = end = inode = written = 0
        for line in _SMAPS.read_text().splitlines():
            first, *rest = line.split()
            if not first.endswith(":"):
                begin, end = (int(address, 16) for address in first.split("-"))
                inode, written = int(rest[3]), 0
            elif first in ("Anonymous:", "Swap:"):
                written += int(rest[0])
                if first == "Swap:" and inode and not written:
                    self._begins.append(begin)
                    self._ends.append(end)

    def drop(self, address: int, nbytes: int) -> int:
        """Take the whole pages of a range out of memory; return how many bytes, 0 where that would lose something."""
        at = bisect.bisect_right(self._begins, address) - 1
        advise = madvise()
        if at < 0 or address + nbytes > self._ends[at] or advise is None:
            return 0
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        return size if size > 0 and advise(begin, size, _DONTNEED) == 0 else 0

    def drop_tensors(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Take all of some tensors out of memory; reading them reads the file again."""
        for tensor in tensors:
            parts = stored_parts(tensor) if isinstance(tensor, StoredWeight) else [tensor]
            for part in parts:
                if part is not None:
                    self.drop(part.data_ptr(), part.numel() * part.element_size())


def _is_foreign(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory is not of torch's own allocation."""
    if isinstance(tensor, StoredWeight):
        return _is_foreign(tensor.codes)
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()
