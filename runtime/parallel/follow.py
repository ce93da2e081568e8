"""The loop of a rank other than 0: it does what the messages say, and decides nothing."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ..autocast import without_autocast
from ..cache.block_copier import BlockCopier
from ..cache.host_blocks import HostBlocks
from ..cache.kv_cache import allocate_kv_cache
from ..cache.pool_plan import CacheSizes, cache_counts
from ..device_queue import with_sampled
from ..memory import free_device_memory, keep_freed_memory
from ..ops.collectives import set_group
from ..program import KVCache, Program
from ..step_metadata import StepMetadata
from .channel import Channel, ChannelClosed
from .device_group import exchanging
from .facts import digest_of
from .group import CollectiveFailed, GroupFailed, RankGroup, least_counts
from .messages import Message, Pending, Step, TornMessage, copies_of, step_of
from .shared_bytes import SharedBytes

LoadProgram = Callable[[Message, RankGroup], Program]
"""Makes this rank's part of what a message of kind ``"load"`` describes."""

_MAX_TRACEBACK = 20_000


def take_part(
    channel: Channel, meet: Callable[[], RankGroup], load_program: LoadProgram, known: Mapping[str, Any]
) -> None:
    """Be a rank other than 0 from its start to its end.

    Args:
        channel: to rank 0.
        meet: makes the group of all ranks, once.
        load_program: makes this rank's program.
        known: what rank 0 compares with what it has itself.

    Raises:
        Exception: what happened here, or that another rank failed; rank 0 is told.
    """
    try:
        channel.send(Message("here", known))
        message = channel.receive()
        group = meet()
        set_group(group)
        program = load_program(message, group)
        channel.send(Message("loaded", digest_of(program)))
        follow(program, channel, group)
    except ChannelClosed:
        pass
    except BaseException as error:
        with suppress(ChannelClosed):
            channel.send(failed_message(error))
        raise


def follow(program: Program, channel: Channel, group: RankGroup) -> None:
    """Run a program as rank 0 says, until it closes the channel.

    Args:
        program: this rank's part.
        channel: to rank 0.
        group: all ranks.

    Raises:
        TornMessage: a message was damaged.
        GroupFailed: another rank has failed, or this one would not do what rank 0 does.
    """
    follower = Follower(program, group)
    if program.device.type == "cpu":
        keep_freed_memory()
    while True:
        try:
            message = channel.receive()
        except ChannelClosed:
            return
        follower.do(message)


class Follower:
    """A rank's program and caches.

    Args:
        program: this rank's part.
        group: all ranks.
    """

    def __init__(self, program: Program, group: RankGroup) -> None:
        self.program = program
        self.group = group
        join(program, group)
        self._spare = self._block_size = 0
        self._kv_cache: KVCache = []
        self._copier = BlockCopier([], [], [])
        self._shared: SharedBytes | None = None

    def do(self, message: Message) -> None:
        """Do what a message says.

        Raises:
            TornMessage: it does not say what its kind says.
        """
        todo = getattr(self, f"_{message.kind}", None)
        if todo is None:
            raise TornMessage(f"message {message.number} of kind {message.kind!r} is not for this rank now")
        try:
            todo(message)
        except KeyError as error:
            raise TornMessage(f"message {message.number} of kind {message.kind!r} lacks {error}") from error

    def _count(self, message: Message) -> None:
        sizes = own_memory(CacheSizes(**message.values), self.program.device)
        least_counts(cache_counts(self.program.caches, sizes), self.group)

    def _reserve(self, message: Message) -> None:
        self._spare = self.program.reserve(*message.values["limits"])
        self._agree_done(self._spare)

    def _bind(self, message: Message) -> None:
        self._block_size = message.values["block_size"]
        self._kv_cache = self._allocate(message.values["counts"], self.program.device)
        self._copier = BlockCopier(self._kv_cache, [], self._groups)
        self.program.bind(self._kv_cache)
        self._agree_done(0)

    def _host(self, message: Message) -> None:
        counts, paths = message.values["counts"], message.values["shared"]
        self._shared = SharedBytes.join(paths[self.group.rank - 1]) if paths else None
        host: KVCache = []
        if self._shared is not None:
            self._shared.num_copied = 0
            host = HostBlocks(self.program.caches, counts, self._block_size, self._shared.allocate).cache
        elif counts:
            host = self._allocate(counts, torch.device("cpu"))
        self._copier = BlockCopier(self._kv_cache, host, self._groups)
        self._agree_done(0)

    def _warm_up(self, message: Message) -> None:
        warm_up = getattr(self.program, "warm_up", None)
        if warm_up is not None:
            with without_autocast(self.program.device.type):
                warm_up()

    def _step(self, message: Message) -> None:
        step = step_of(message)
        mode = mode_of(self.program, step.metadata)
        if mode != step.mode:
            raise GroupFailed(self.group.rank, f"would run {mode!r}, but rank 0 runs {step.mode!r}")
        self._copier.start(step.copies)
        try:
            with torch.inference_mode(), exchanging(self.group):
                self.program(self._ids(step), step.position_ids, step.metadata)
        finally:
            self._copier.join()
        if step.copies:
            self._note_copied()

    def _ids(self, step: Step) -> torch.Tensor:
        if step.pending is None:
            return step.input_ids
        room = torch.empty(step.pending.count, dtype=torch.int64, device=self.program.device)
        return ids_with(step.input_ids, step.pending, self.group.broadcast(room, 0))

    def _copies(self, message: Message) -> None:
        self._copier.run(copies_of(message))
        self._note_copied()

    def _note_copied(self) -> None:
        if self._shared is not None:
            self._shared.num_copied += 1

    def _discard(self, message: Message) -> None:
        values = message.values
        self._copier.discard(values["group"], values["first"], values["end"])

    def _allocate(self, counts: list[int], device: torch.device) -> KVCache:
        return allocate_kv_cache(self.program.caches, counts, self._block_size, device)

    @property
    def _groups(self) -> Sequence[int]:
        return [spec.group for spec in self.program.caches]

    def _agree_done(self, spare: int) -> None:
        self.group.agree(spare, "equal", "number of spare blocks")


def ids_with(ids: torch.Tensor, pending: Pending, sampled: torch.Tensor) -> torch.Tensor:
    """The ids ``[1, T]`` of a step, on the device, with the tokens that it waits for."""
    return with_sampled(ids, pending.where, pending.sources, sampled)


def own_memory(sizes: CacheSizes, device: torch.device) -> CacheSizes:
    """The sizes of caches by the memory of this rank's own device, where it has one."""
    if device.type == "cpu" or sizes.free_memory is None:
        return sizes
    return replace(sizes, free_memory=free_device_memory(device))


def join(program: Program, group: RankGroup) -> None:
    """Tell a program that asks for it of the ranks that run it."""
    if hasattr(program, "group"):
        program.group = group


def mode_of(program: Program, step: StepMetadata) -> str:
    """How a program is going to run a step: all ranks run it in the same way."""
    mode = getattr(program, "mode", None)
    return "" if mode is None else str(mode(step))


def failed_message(error: BaseException) -> Message:
    """What a rank tells before it ends because of an error."""
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0][:500]
    lines = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
    values = {"reason": reason, "traceback": lines, "is_consequence": isinstance(error, CollectiveFailed)}
    return Message("failed", values)
