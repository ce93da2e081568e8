"""Read no more of the files that weights are mapped from than is needed, and give back their memory, once their
values are held elsewhere.

Checkpoints are mapped, not read: a weight's pages stay resident after the weight has moved, as long as another one
of the same file is in use. Pages that were never written to can be dropped at any time; whoever reads them again gets
the file's bytes.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ...runtime.memory import madvise
from ...runtime.ops.linear.stored_weight import StoredWeight, stored_parts

_RANDOM, _WILLNEED, _DONTNEED = 1, 3, 4
_MOST_ASKED = 128 << 10
"""Bytes that one call makes Linux read: no more than a disk reads ahead, by default so much."""
_MOST_SKIPPED = 4096
"""Bytes between runs that are read with them: a part of a page costs all of it."""
_without_read_ahead: set[str] = set()
"""Inodes of the files that ``read_no_more`` was called for."""
_MAPS, _SMAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")


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
            for part in [] if tensor is None else _plain_parts(tensor):
                self.drop(part.data_ptr(), part.numel() * part.element_size())


def read_no_more(path: str) -> None:
    """Let the system read nothing around what is read of a file that is mapped.

    It otherwise reads what lies before and behind, on some disks megabytes of it: parts of other ranks. What is not
    asked for by ``will_read`` is read page by page from now on.
    """
    advise, inode = madvise(), str(os.stat(path).st_ino)
    if advise is None or not _MAPS.exists():
        return
    _without_read_ahead.add(inode)
    for line in _MAPS.read_text().splitlines():
        addresses, _, _, _, found, *_ = line.split(maxsplit=5)
        if found == inode:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            advise(begin, end - begin, _RANDOM)


def will_read(tensors: Iterable[torch.Tensor | None]) -> None:
    """Let the system begin to read tensors that are mapped from files, those parts alone; no-op before
    ``read_no_more``, as the system reads ahead by itself then."""
    advise = madvise()
    if advise is None or not _without_read_ahead:
        return
    for tensor in tensors:
        for part in [] if tensor is None else _plain_parts(tensor):
            if _is_foreign(part) and part.numel():
                for address, nbytes in _runs(part):
                    begin, end = _pages_of(address, nbytes)
                    for at in range(begin, end, _MOST_ASKED):
                        advise(at, min(end - at, _MOST_ASKED), _WILLNEED)


def _runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Address and bytes of each run of a tensor's memory, those that lie close to each other as one."""
    size, outer = tensor.element_size(), []
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, count in ((stride * tensor.element_size(), count) for stride, count in dims if count > 1):
        if stride - size <= _MOST_SKIPPED:
            size = max(size, stride * (count - 1) + size)
        else:
            outer.append(range(0, stride * count, stride))
    for offsets in itertools.product(*outer):
        yield tensor.data_ptr() + sum(offsets), size


def _pages_of(address: int, nbytes: int) -> tuple[int, int]:
    """Begin and end of the whole pages that a range lies in."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _plain_parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    return stored_parts(tensor) if isinstance(tensor, StoredWeight) else [tensor]


def _is_foreign(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory is not of torch's own allocation."""
    if isinstance(tensor, StoredWeight):
        return _is_foreign(tensor.codes)
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()
