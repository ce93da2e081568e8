"""The ranks of one host, which exchange tensors through memory that they share."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import struct
import time
from pathlib import Path

import torch

from ..ops.collectives import GROUP
from ..ops.native import FLOAT_CODES, kernel_function
from ..private_folder import check_private_folder
from ..process_state import process_state
from .group import CollectiveFailed

MOST_RANKS = 64
SLOT_BYTES = 1 << 20
"""Of a tensor that are exchanged at a time."""
TIMEOUT = 300.0
"""Seconds that ranks wait for each other."""

# SharedHeader, Member and the arguments in csrc/shared_reduce.cpp.
_HEADER = struct.Struct("=8s4q")
_MAGIC, _VERSION = b"pagodaSG", 1
_FAILURE, _FIRST_SEAT, _SEAT, _PROCESS, _WORDS, _WORD_BYTES, _REGIONS = 64, 128, 128, 24, 8320, 256, 28672
_SIZE, _TIMEOUT, _STEP, _EXCHANGES, _SPENT, _WATCHED = 2, 4, 5, 6, 7, 8
_ARGUMENTS = struct.Struct("=6q")
_STOPPED, _LATE, _ENDED, _DIFFER = 1, 2, 3, 4
_FIRST_ROUND = (1 << 32) - 1000  # the counters wrap around soon, so that every run shows that they may
_STATES = {"": "ended", "T": "stopped", "t": "stopped by a debugger", "Z": "ended", "X": "ended", "R": "running"}


class SharedGroup:
    """A rank's part in a group of processes on one host (a :class:`~..ops.collectives.ParallelGroup`).

    Rank 0 creates the group and the others join it; then each of them calls ``meet``. All ranks make the same calls
    in the same order. A rank that finds another one ended, late or busy with another tensor fails the group: every
    call raises from then on, on all ranks. Nothing is left behind when processes are killed.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        name: by which graphs name the group.
    """

    def __init__(self, descriptor: int, rank: int, name: str, link: Path) -> None:
        """Map the memory of a group whose header was written, for one of its ranks."""
        self.rank, self.name = rank, name
        self._descriptor, self._link = descriptor, link
        self._memory = mmap.mmap(descriptor, 0)
        _, _, self.size, slot_bytes, _ = _HEADER.unpack_from(self._memory)
        anchor = ctypes.c_char.from_buffer(self._memory)
        watched = [-1] * MOST_RANKS
        fields = (ctypes.addressof(anchor), rank, self.size, slot_bytes, 0, 0, 0, 0, *watched)
        self._member = (ctypes.c_int64 * len(fields))(*fields)
        self._address = ctypes.addressof(self._member)
        del anchor  # the mapping stays where it is until it is closed
        self.timeout = TIMEOUT
        struct.pack_into("=q", self._memory, self._seat(rank) + _PROCESS, os.getpid())

    @classmethod
    def create(cls, folder: Path, size: int, name: str = GROUP, slot_bytes: int = SLOT_BYTES) -> SharedGroup:
        """Create a group as its rank 0.

        Args:
            folder: a private one (see ``private_folder``), which every rank can read.
            size: number of ranks, 1 to 64.
            name: by which graphs name the group.
            slot_bytes: of a tensor that are exchanged at a time, a multiple of 4096.

        Raises:
            ValueError: there is no such size.
            OSError: the folder isn't private, or has a group of that name, or the system shares no memory.
            RuntimeError: there are no kernels.
        """
        if not 1 <= size <= MOST_RANKS or slot_bytes < mmap.PAGESIZE or slot_bytes % mmap.PAGESIZE:
            raise ValueError(f"size is {size}, slot_bytes {slot_bytes}; give 1 to {MOST_RANKS} ranks, whole pages")
        _check_place(folder)
        header = _HEADER.pack(_MAGIC, _VERSION, size, slot_bytes, _bytes_of(size, slot_bytes))
        descriptor = os.memfd_create(f"pagoda-{name}", os.MFD_CLOEXEC)
        link = folder / f"{name}.group"
        try:
            os.ftruncate(descriptor, _bytes_of(size, slot_bytes))
            for rank in range(size):
                os.pwrite(descriptor, struct.pack("=I", _FIRST_ROUND), _FIRST_SEAT + rank * _SEAT)
            os.pwrite(descriptor, header, 0)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            return cls(descriptor, 0, name, link)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def join(cls, folder: Path, rank: int, name: str = GROUP) -> SharedGroup:
        """Join a group as another rank than the first.

        Args:
            folder: in which rank 0 created it.
            rank: of this process.
            name: by which graphs name the group.

        Raises:
            FileNotFoundError: there is no such group, or all have joined it.
            ValueError: what is there is no group of this version, has no such rank, or has it already.
            OSError: the folder isn't private, or the memory is another user's.
            RuntimeError: there are no kernels.
        """
        _check_place(folder)
        link = folder / f"{name}.group"
        descriptor = os.open(link, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_memory(descriptor, link, rank)
            return cls(descriptor, rank, name, link)
        except BaseException:
            os.close(descriptor)
            raise

    def meet(self) -> None:
        """Wait until all ranks have joined, and watch their processes from then on.

        Raises:
            CollectiveFailed: they have not within ``timeout``, or one has ended.
        """
        deadline = time.monotonic() + self.timeout
        for rank in range(self.size):
            while not self._process(rank):
                if time.monotonic() > deadline:
                    raise CollectiveFailed(rank, f"did not join the group within {self.timeout:g} s")
                self._raise_if_failed()
                time.sleep(0.002)
            if rank != self.rank:
                self._member[_WATCHED + rank] = self._watch(rank)
        self._forget_link()

    @property
    def timeout(self) -> float:
        """Seconds that this rank waits for the others; it may be set, before it waits."""
        return self._member[_TIMEOUT] / 1e9

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._member[_TIMEOUT] = int(seconds * 1e9)

    @property
    def step(self) -> int:
        """Number of the step that runs, which must be the same on all ranks; whoever runs steps sets it."""
        return self._member[_STEP]

    @step.setter
    def step(self, number: int) -> None:
        self._member[_STEP] = number

    @property
    def seconds(self) -> float:
        """Those that this rank has spent in exchanges."""
        return self._member[_SPENT] / 1e9

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``x``: added in the order of the ranks in float32, the same bits on all of them.

        Raises:
            ValueError: ``x`` is neither fp32, bf16 nor fp16.
            CollectiveFailed: another rank ended, is late or sums something else.
        """
        if x.dtype not in FLOAT_CODES:
            raise ValueError(f"x has dtype {x.dtype}; sums of ranks are of fp32, bf16 or fp16")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._call("pagoda_shared_all_reduce", x, out, FLOAT_CODES[x.dtype], x.numel())
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``, of any dtype, beside each other in the order of the ranks along the last dim.

        Raises:
            CollectiveFailed: another rank ended, is late or gathers something else.
        """
        x = x.contiguous()
        *sizes, last = x.shape
        out = x.new_empty((*sizes, last * self.size))
        if x.numel():
            self._call("pagoda_shared_all_gather", x, out, x.numel() // last, last * x.element_size())
        return out

    def stop(self, reason: str) -> None:
        """Fail the group: whoever waits in a call returns at once. Any thread may call it.

        Args:
            reason: a sentence for the other ranks' errors.
        """
        if not self._member[0]:
            return
        words = reason.encode()[: _WORD_BYTES - 1].ljust(_WORD_BYTES, b"\0")
        at = _WORDS + self.rank * _WORD_BYTES
        self._memory[at : at + _WORD_BYTES] = words
        kernel = kernel_function("pagoda_shared_stop")
        assert kernel is not None
        kernel(struct.pack("=q", self._address))

    def close(self) -> None:
        """Leave the group. Its calls raise from now on; another thread must not be in one."""
        if self._member[0]:
            self._member[0] = 0
            self._forget_link()
            for rank in range(self.size):
                if self._member[_WATCHED + rank] >= 0:
                    os.close(self._member[_WATCHED + rank])
            self._memory.close()

    def _call(self, name: str, x: torch.Tensor, out: torch.Tensor, first: int, second: int) -> None:
        kernel = kernel_function(name, self._raise_failure)
        assert kernel is not None
        threads = torch.get_num_threads()
        if kernel(_ARGUMENTS.pack(self._address, x.data_ptr(), out.data_ptr(), first, second, threads)):
            self._raise_failure()

    def _raise_if_failed(self) -> None:
        if any(self._memory[_FAILURE : _FAILURE + 8]):
            self._raise_failure()

    def _raise_failure(self) -> None:
        if not self._member[0]:
            raise CollectiveFailed(self.rank, "has left the group")
        (failure,) = struct.unpack_from("=Q", self._memory, _FAILURE)
        kind, culprit, teller = failure & 255, failure >> 8 & 255, failure >> 16 & 255
        where = f"exchange {self._member[_EXCHANGES]} (step {self.step})"
        process = f"(pid {self._process(culprit)}"
        if kind == _LATE:
            state = _STATES.get(process_state(self._process(culprit)), "waiting")
            raise CollectiveFailed(culprit, f"{process}, {state}) did not reach {where} within {self.timeout:g} s")
        if kind == _ENDED:
            raise CollectiveFailed(culprit, f"{process}) ended before {where}")
        if kind == _DIFFER:
            raise CollectiveFailed(culprit, f"{process}) and rank {teller} exchange different tensors in {where}")
        words = self._memory[_WORDS + culprit * _WORD_BYTES :][:_WORD_BYTES].partition(b"\0")[0]
        raise CollectiveFailed(culprit, f"{process}) stopped the group in {where}: {words.decode(errors='replace')}")

    def _watch(self, rank: int) -> int:
        """A descriptor of a rank's process, readable once it ends; -1 where the system has none."""
        process = self._process(rank)
        try:
            return os.pidfd_open(process)
        except ProcessLookupError:
            raise CollectiveFailed(rank, f"(pid {process}) ended at the start") from None
        except (AttributeError, OSError):
            return -1

    def _process(self, rank: int) -> int:
        process: int = struct.unpack_from("=q", self._memory, self._seat(rank) + _PROCESS)[0]
        return process

    @staticmethod
    def _seat(rank: int) -> int:
        return _FIRST_SEAT + rank * _SEAT

    def _forget_link(self) -> None:
        """Nobody else joins: close what the memory was mapped by."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self.rank == 0:
                self._link.unlink(missing_ok=True)


def _check_place(folder: Path) -> None:
    if kernel_function("pagoda_shared_all_reduce") is None:
        raise RuntimeError("there are no C++ kernels that share memory")
    check_private_folder(folder)


def _check_memory(descriptor: int, path: Path, rank: int) -> None:
    """Hold what a file has against what a group's memory is."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(f"{path} is no memory of this user's")
    header = os.pread(descriptor, _HEADER.size, 0)
    if len(header) < _HEADER.size or header[:8] != _MAGIC:
        raise ValueError(f"{path} is no group's memory")
    _, version, size, slot_bytes, total = _HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{path} has version {version} of a group's memory; this process knows {_VERSION}")
    whole = 1 <= size <= MOST_RANKS and mmap.PAGESIZE <= slot_bytes <= 1 << 30 and slot_bytes % mmap.PAGESIZE == 0
    if not whole or not total == status.st_size == _bytes_of(size, slot_bytes):
        raise ValueError(f"{path} is damaged: {status.st_size} bytes for {size} ranks with slots of {slot_bytes}")
    if not 1 <= rank < size:
        raise ValueError(f"rank {rank} can't join the group in {path}; it has ranks 1 to {size - 1} beside its first")
    (process,) = struct.unpack("=q", os.pread(descriptor, 8, _FIRST_SEAT + rank * _SEAT + _PROCESS))
    if process:
        raise ValueError(f"process {process} is rank {rank} of the group in {path} already")


def _bytes_of(size: int, slot_bytes: int) -> int:
    return _REGIONS + 4 * size * slot_bytes
