"""The program of all ranks: each message goes to the others, then rank 0 does its part."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..blocks import CacheCopy
from ..cache.block_copier import BlockCopier
from ..cache.pool_plan import CacheCounts, CacheSizes, cache_counts
from ..device_queue import DeviceQueue, with_sampled
from ..program import CacheSpec, KVCache, Program
from ..step_metadata import StepMetadata
from .device_group import DeviceGroup, exchanging
from .follow import ids_with, join, mode_of, own_memory
from .group import GroupFailed, least_counts
from .group_queue import GroupQueue
from .interrupts import interrupts_held
from .messages import Message, Pending, Step, copies_message, step_message
from .rank_blocks import RankBlocks
from .shared_bytes import SharedBytes

if TYPE_CHECKING:
    from .launch import Ranks

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 1e-4
"""Between two looks at whether the others have made their copies."""


class LeaderProgram:
    """A ``Program`` whose steps all ranks run, each its part; attributes are those of rank 0's.

    An exception behind the first byte of a message leaves the ranks in different states, so it ends them all, and
    ``GroupFailed`` is raised.

    Args:
        program: rank 0's part.
        ranks: the others, loaded.
    """

    def __init__(self, program: Program, ranks: Ranks) -> None:
        self.caches = program.caches
        self.vocab_size = program.vocab_size
        self.max_model_len = program.max_model_len
        self.restart_length = program.restart_length
        self.rope_switch = program.rope_switch
        self.device = program.device
        self.block_size = program.block_size
        self._program = program
        self._ranks = ranks
        self._copies: Sequence[CacheCopy] = ()
        self._begun: deque[tuple[int, torch.Tensor, torch.Tensor, StepMetadata]] = deque()
        self._waiting: tuple[torch.Tensor, Pending, torch.Tensor] | None = None
        self._num_steps = 0
        self._setup: dict[str, tuple[Message, int]] = {}
        self._shared: Sequence[SharedBytes] = ()
        self.num_copies = 0
        self.queue: DeviceQueue | None = None
        if isinstance(ranks.group, DeviceGroup):
            self.queue = GroupQueue(self.device, self._together)
        join(program, ranks.group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Run one flat step on all ranks."""
        self._num_steps += 1
        with self._together(f"step {self._num_steps}"):
            waiting, self._waiting = self._waiting, None
            pending = None if waiting is None or waiting[0] is not input_ids else waiting[1]
            self._send_step(input_ids, position_ids, step, pending)
            with exchanging(self._ranks.group):
                if waiting is not None and pending is not None:
                    input_ids = ids_with(input_ids, pending, self._ranks.group.broadcast(waiting[2], 0))
                return self._program(input_ids, position_ids, step)

    def let_wait(
        self, ids: torch.Tensor, where: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """The ids of the next step, of which some are among ``sampled``. Where these are on a device, they are
        broadcast to the other ranks' behind what it has yet to do, and the host waits for nothing."""
        if not isinstance(self._ranks.group, DeviceGroup):
            return with_sampled(ids, where, sources, sampled)
        self._waiting = ids, Pending(where, sources, len(sampled)), sampled
        return ids

    def begin(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> None:
        """Let the other ranks run a step, of which this one does its part by ``finish``: this rank runs the last
        stage of a pipeline."""
        self._num_steps += 1
        with self._together(f"step {self._num_steps}"):
            self._begun.append((self._num_steps, input_ids, position_ids, step))
            self._send_step(input_ids, position_ids, step)

    def finish(self) -> torch.Tensor:
        """The logits of the step that began first of those that are not finished."""
        number, input_ids, position_ids, step = self._begun.popleft()
        with self._together(f"step {number}"):
            return self._program(input_ids, position_ids, step)

    def drain(self) -> None:
        """Finish what has begun, for nothing: the ranks pass on values in the order of the steps."""
        with torch.inference_mode():
            while self._begun:
                self.finish()

    def _send_step(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        step: StepMetadata,
        pending: Pending | None = None,
    ) -> None:
        sent = Step(input_ids, position_ids, step, mode_of(self._program, step), self.take_copies(), pending)
        self._ranks.send(step_message(sent))

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline that the ranks run; 1 for none."""
        return self._ranks.stages

    def cache_counts(self, sizes: CacheSizes) -> CacheCounts:
        """What the caches of every rank hold: of each number the least."""
        sizes = replace(own_memory(sizes, self.device), ranks=self._ranks.size)
        own = cache_counts(self.caches, sizes)
        with self._together("planning the caches"):
            self._ranks.send(Message("count", asdict(sizes)))
            return least_counts(own, self._ranks.group)

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        """Announce the largest steps to all ranks; see ``Program``."""
        limits = [max_num_seqs, max_num_batched_tokens, max_model_len, num_drafts]
        spare = self._program.reserve(*limits)
        self._set_up(Message("reserve", {"limits": limits}), spare)
        return spare

    def bind(self, kv_cache: KVCache) -> None:
        """Give every rank caches of so many blocks as these."""
        self._program.bind(kv_cache)
        self._setup.pop("host", None)
        self._set_up(Message("bind", {"counts": self._counts(kv_cache), "block_size": self._tokens(kv_cache)}))

    def host_blocks(self, num_blocks: Sequence[int], block_size: int) -> RankBlocks:
        """Host memory of blocks that this process reads and writes on all ranks; for ``copier``.

        Args:
            num_blocks: blocks of each group.
            block_size: tokens per block.

        Raises:
            ValueError: the ranks are no child processes, or do not divide the KV heads.
        """
        if not self._ranks.are_children:
            raise ValueError(
                "kv_store: the ranks may be on several hosts, as no child processes are; use "
                "distributed_executor_backend='mp'"
            )
        blocks = RankBlocks(self.caches, num_blocks, block_size, self._ranks.size)
        self._shared = blocks.shared
        return blocks

    def copier(self, kv_cache: KVCache, host_cache: KVCache, group_of_layer: Sequence[int]) -> LeaderCopier:
        """What copies blocks of the caches that are bound, on all ranks."""
        counts = self._counts(host_cache) if host_cache else []
        self._set_up(Message("host", {"counts": counts, "shared": [memory.path for memory in self._shared]}))
        return LeaderCopier(self, kv_cache, host_cache, group_of_layer)

    def has_copied(self, count: int) -> bool:
        """Whether every rank with shared host memory has made copies so often.

        Raises:
            GroupFailed: none will.
        """
        if self._ranks.failure is not None:
            raise self._ranks.failure
        return all(memory.num_copied >= count for memory in self._shared)

    def warm_up(self) -> None:
        """Compile or capture steps of all planned sizes on every rank."""
        warm_up = getattr(self._program, "warm_up", None)
        if warm_up is not None:
            with self._together("warm-up", self._ranks.load_timeout):
                self._ranks.send(Message("warm_up"))
                warm_up()

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return self._ranks.pids

    @property
    def failure(self) -> GroupFailed | None:
        """What has failed, once the other ranks were ended because of it."""
        return self._ranks.failure

    def start_again(self) -> bool:
        """After ``GroupFailed``: start other ranks, with empty caches of the same sizes. False if there were too many
        starts of late."""
        self._copies = ()
        self._begun.clear()
        self.num_copies = 0
        if self._ranks.failure is None:
            return False  # it is this rank's device that is lost
        while self._ranks.failure is not None:
            try:
                if not self._ranks.start_again(self._program):
                    return False
                join(self._program, self._ranks.group)
                for message, spare in list(self._setup.values()):
                    self._set_up(message, spare)
            except GroupFailed as error:
                logger.warning("while ranks start again: %s", error)
            except (OSError, ValueError) as error:
                raise GroupFailed(0, f"cannot start the others again: {error}") from error
        return True

    def graph_stats(self) -> dict[str, int | float]:
        """Those of rank 0, the number of ``ranks``, how often others were started anew, ``rank_restarts``, and the
        seconds that rank 0 spent in exchanges with them, ``collective_seconds``."""
        own: dict[str, int] = getattr(self._program, "graph_stats", dict)()
        of_ranks = {"rank_restarts": self._ranks.num_restarts, "collective_seconds": self._ranks.seconds}
        return {**own, "ranks": self._ranks.size, **of_ranks}

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()

    def all_do(self, message: Message, own: Callable[[], None]) -> None:
        """Send what the other ranks do by themselves, and do this rank's part."""
        with self._together(message.kind):
            self._ranks.send(message)
            own()

    @contextmanager
    def _together(self, name: str, seconds: float | None = None) -> Iterator[None]:
        with interrupts_held(), self._ranks.task(name, seconds):
            yield

    def _set_up(self, message: Message, spare: int = 0) -> None:
        """Send what new ranks have to be told, too, and wait until all have done it and need as many blocks."""
        self._setup[message.kind] = message, spare
        with self._together(message.kind):
            self._ranks.send(message)
            self._ranks.group.agree(spare, "equal", "number of spare blocks")

    def take_copies(self) -> Sequence[CacheCopy]:
        """The copies that go with the next step, once."""
        copies, self._copies = self._copies, ()
        return copies

    def give_copies(self, copies: Sequence[CacheCopy]) -> None:
        """Let copies go with the next step."""
        self._copies = copies

    def _counts(self, cache: KVCache) -> list[int]:
        """Blocks, or slots, of each group of layers."""
        counts = {spec.group: layer[0].shape[0] for spec, layer in zip(self.caches, cache, strict=True)}
        return [counts[group] for group in sorted(counts)]

    def _tokens(self, cache: KVCache) -> int:
        """Of a block; 1 where there are only states."""
        return next(
            (
                layer[0].shape[2 if spec.parts()[0].by_head else 1]
                for spec, layer in zip(self.caches, cache, strict=True)
                if isinstance(spec, CacheSpec)
            ),
            1,
        )


class LeaderCopier(BlockCopier):
    """Copies blocks on all ranks.

    Args:
        program: tells the other ranks.
        kv_cache: rank 0's, as for ``BlockCopier``.
        host_cache: the same.
        group_of_layer: the same.
    """

    def __init__(
        self, program: LeaderProgram, kv_cache: KVCache, host_cache: KVCache, group_of_layer: Sequence[int]
    ) -> None:
        super().__init__(kv_cache, host_cache, group_of_layer)
        self._program = program

    def run(self, copies: Sequence[CacheCopy]) -> None:
        """Make the copies on all ranks."""
        if copies:
            self._program.all_do(copies_message(copies), lambda: self._make(copies))

    def discard(self, group: int, first: int, end: int) -> None:
        """Discard unused blocks on all ranks."""
        values = {"group": group, "first": first, "end": end}
        self._program.all_do(Message("discard", values), partial(BlockCopier.discard, self, **values))

    def _make(self, copies: Sequence[CacheCopy]) -> None:
        """Make this rank's copies; they are made where the others have made theirs, too, if somebody reads those."""
        on_copied, self.on_copied = self.on_copied, None
        try:
            super()._make(copies)
        finally:
            self.on_copied = on_copied
        self._program.num_copies += 1
        if on_copied is None:
            return
        while not self._program.has_copied(self._program.num_copies):
            time.sleep(_WAIT_SECONDS)
        on_copied(copies)

    def start(self, copies: Sequence[CacheCopy]) -> None:
        """Make the copies beside the next step, on all ranks."""
        self._program.give_copies(copies)
        super().start(copies)

    def join(self) -> None:
        """Wait for the copies of this rank; where no step has gone with them, the others make them now."""
        try:
            if copies := self._program.take_copies():
                self._program.all_do(copies_message(copies), lambda: None)
        finally:
            super().join()
