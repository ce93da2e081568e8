"""Memory of another rank that rank 0 maps, too, so that it can read and write the blocks that lie there."""

from __future__ import annotations

import mmap
import os
import weakref

import torch


class SharedBytes:
    """Memory of two processes of one host, which ends with them, and a count of what the second one has copied.

    Both allocate the same sizes in the same order.

    Args:
        descriptor: of the memory, which this object closes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._end = descriptor, 0
        weakref.finalize(self, os.close, descriptor)
        self._num_copied = self.allocate(torch.int64.itemsize).view(torch.int64)

    @classmethod
    def create(cls) -> SharedBytes:
        """New memory.

        Raises:
            OSError: the system has none.
        """
        return cls(os.memfd_create("torch_pagoda-host", os.MFD_CLOEXEC))

    @classmethod
    def join(cls, path: str) -> SharedBytes:
        """The memory that another process has created.

        Args:
            path: what that process has as ``path``.

        Raises:
            OSError: that process is gone, or another user's.
        """
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where other processes of the host find it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def allocate(self, size: int) -> torch.Tensor:
        """Return so many bytes, zeros at first."""
        begin, self._end = self._end, self._end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self._descriptor).st_size < self._end:
            os.ftruncate(self._descriptor, self._end)
        return torch.frombuffer(mmap.mmap(self._descriptor, size, offset=begin), dtype=torch.uint8)

    @property
    def num_copied(self) -> int:
        """How often the second process has made the copies that it was told of."""
        return int(self._num_copied[0])

    @num_copied.setter
    def num_copied(self, count: int) -> None:
        self._num_copied[0] = count
