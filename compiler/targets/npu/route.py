"""The base of the two ways to run a lowered graph on an NPU, which select the sizes of steps."""

from __future__ import annotations

import logging
import signal
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ....passes import TracedGraph
from ....passes.graph.fx_nodes import is_tensor, value
from ....runtime.cache.cache_specs import has_state
from ....runtime.device_queue import sent
from ....runtime.parallel.group import RankGroup
from ....runtime.program import KVCache, StateSpec, is_cache_input
from ....runtime.step_metadata import StepMetadata
from .flat_graph import is_constant, list_inputs
from .sizes.step_padding import StepSize, pad_step, size_of, spare_blocks
from .warm_up.steps import STATE_SLOTS, SpareRoom, StepShape, chain_blocks

log = logging.getLogger(__name__)

Run = Callable[..., Sequence[Any]]
"""A function of a graph's placeholders, or of their flat form, that returns its outputs."""


@dataclass(frozen=True)
class PlannedSize:
    """A size of steps that is compiled or captured ahead of requests, and compared (see ``warm_up``).

    Attributes:
        name: in words, such as "decode steps of 8 tokens".
        shapes: steps that run at this size, in the order in which they are run.
        compile: make ready what needs no step; nothing where the first run captures. It raises what the toolchain
            raises.
        run: the graph's outputs for the arguments of a step of this size, by the compiled or captured graph and never
            in another way; the first run may capture. It raises what the toolchain raises.
        drop: leave the size out from now on, for the given reason: its steps run at another size, or operator by
            operator. ``run`` is not called again.
    """

    name: str
    shapes: tuple[StepShape, ...]
    compile: Callable[[], object]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    drop: Callable[[str], None]


class Route(ABC):
    """A function of a lowered graph's placeholders that runs steps of planned sizes.

    First ``reserve``, then ``bind``, then ``warm_up.warm_up``, then for each step ``fit`` and a call with the
    arguments of what that returned.

    Args:
        traced: a lowered graph; its constants are linked.
        eager: runs the graph's calls one by one, for steps that are not compiled or captured; by default the graph.

    Attributes:
        name: as option ``codegen`` spells it.
        lists: positions of the placeholders that receive lists of lengths.
        changing: positions of those that receive another tensor at each step.
        kv_cache: as bound.
        spare_room: blocks and slots for steps of no request, once caches are bound.
        group: the ranks that run the program together; None: this process does alone. Only then does a step of which
            no graph can be made run operator by operator: on other ranks it would not.
        is_warm: every planned size was compiled or captured, or left out; nothing is from now on.
        eager_steps: why steps ran operator by operator → how many.
        dropped_schedules: name of a schedule → why graphs are compiled without it from now on.
    """

    name: str

    def __init__(self, traced: TracedGraph, eager: Run | None = None) -> None:
        assert traced.npu is not None
        self.traced = traced
        self.eager: Run = traced.module if eager is None else eager
        self.block_size = traced.npu.block_size
        self.device: torch.device = value(traced.placeholder(traced.input_ids)).device
        self.lists = list_inputs(traced)
        self.changing = _changing_tensors(traced)
        self.kv_cache: KVCache = []
        self.spare_room: SpareRoom | None = None
        self.group: RankGroup | None = None
        self.is_warm = False
        self.eager_steps: Counter[str] = Counter()
        self.dropped_schedules: dict[str, str] = {}
        self._sized: tuple[StepMetadata, StepSize | None] | None = None
        self._limits: list[str] = []
        self._max_num_seqs = self._max_num_batched_tokens = self._max_model_len = self._num_drafts = 0
        self._first_spare_block = self._spare_slot = self._spare_blocks = self._padding_blocks = 0

    @property
    def limits(self) -> list[str]:
        """Why fewer sizes are planned than steps could use, one line for each reason."""
        return self._limits

    @property
    def failure(self) -> str:
        """Why a step that was to run as a whole graph ran operator by operator, as no graph for it could be made; ""
        where each could, or others can."""
        return ""

    def planned_sizes(self) -> list[PlannedSize]:
        """The sizes that are planned and were not dropped, in the order of use: decode first."""
        return []

    @abstractmethod
    def plan(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Choose the sizes for a runtime that makes no larger steps; the most tokens that one is padded by."""

    @abstractmethod
    def size_for(self, size: StepSize) -> StepSize | None:
        """The size that a step of ``size`` is filled up to; None when it runs as it is."""

    @abstractmethod
    def __call__(self, *args: Any) -> Sequence[Any]:
        """The graph's outputs. Tensors of a step may live on the host."""

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        """Plan; how many blocks at the end of each cache, and slots of each state, are for padding and for steps of
        no request.

        One for padding at least: dummy sequences without tokens name a block too.
        """
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._max_model_len, self._num_drafts = max_model_len, num_drafts
        padding = self.plan(max_num_seqs, max_num_batched_tokens, max_model_len)
        self._padding_blocks = max(1, spare_blocks(padding, self.block_size))
        shapes = [shape for size in self.planned_sizes() for shape in size.shapes]
        chains = [chain_blocks(shape, max_model_len, self.block_size) for shape in shapes]
        self._spare_blocks = self._padding_blocks + max(chains, default=0)
        if has_state(self.traced.caches):
            self._spare_blocks = max(self._spare_blocks, STATE_SLOTS)
        return self._spare_blocks

    def join(self, group: RankGroup | None) -> None:
        """Take notice of the ranks that run the program together; None: this process does alone."""
        self.group = group

    def reserve_like(self, other: Route) -> None:
        """Use the blocks that ``other`` reserved, at least as many: both run steps over the same caches."""
        self._padding_blocks, self._spare_blocks = other._padding_blocks, other._spare_blocks

    def note_warm(self) -> None:
        """Compile and capture nothing from now on."""
        self.is_warm = True

    def bind(self, kv_cache: KVCache) -> None:
        """Take notice of the caches that later calls receive."""
        for spec, (first, *_) in zip(self.traced.caches, kv_cache, strict=True):
            if isinstance(spec, StateSpec):
                self._spare_slot = first.shape[0] - self._spare_blocks
                first[self._spare_slot :].zero_()  # dummy sequences go on from it
            else:
                self._first_spare_block = first.shape[0] - self._spare_blocks
        self.kv_cache = kv_cache
        self.is_warm = False
        self.spare_room = SpareRoom(
            block_size=self.block_size,
            first_block=self._first_spare_block + self._padding_blocks,
            num_blocks=self._spare_blocks - self._padding_blocks,
            longest=self._max_model_len,
            shared_slot=self._spare_slot,
            read_slot=self._spare_slot + 1,
            write_slot=self._spare_slot + 2,
        )

    def run_by_operator(self, args: Sequence[Any]) -> Sequence[Any]:
        """The graph's outputs, operator by operator."""
        return self.eager(*self.on_device(args))

    def note_eager(self, reason: str) -> None:
        """Count a step that runs operator by operator; the first one of a reason is logged."""
        if not self.eager_steps[reason]:
            log.warning("some steps run operator by operator instead of as a whole graph: %s", reason)
        self.eager_steps[reason] += 1

    @property
    def owned_blocks(self) -> int:
        """Blocks of each cache that are for sequences; they come first."""
        return self._first_spare_block

    @property
    def owned_slots(self) -> int:
        """Slots of each state that are for sequences; they come first."""
        return self._spare_slot

    @property
    def most_dummies(self) -> int:
        """The most dummy tokens that there is room for."""
        return self._padding_blocks * self.block_size

    def mode(self, step: StepMetadata) -> str:
        """The name of the size at which ``fit`` lets a step run; called just before."""
        self._sized = step, self.size_for(size_of(step))
        return str(self._sized[1] or "as it is")

    def fit(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata
    ) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
        """Ids ``[1, T]``, positions ``[1, T]`` and metadata of a step, on the host, at the size that it runs at."""
        sized, self._sized = self._sized, None
        size = sized[1] if sized is not None and sized[0] is step else self.size_for(size_of(step))
        if size is None:
            return input_ids, position_ids, step
        return pad_step(
            input_ids,
            position_ids,
            step,
            size,
            block_size=self.block_size,
            first_spare_block=self._first_spare_block,
            spare_slot=self._spare_slot,
        )

    def on_device(self, args: Sequence[Any]) -> list[Any]:
        """The same with the step's tensors on the device."""
        moved = list(args)
        for i in self.changing:
            moved[i] = sent(moved[i], self.device)
        return moved


@contextmanager
def ctrl_c_kept() -> Iterator[None]:
    """Put the handler of SIGINT back after a block.

    torchair and npugraph_ex, when they are imported, set one that ends the process. An engine that is interrupted by
    KeyboardInterrupt goes on.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _changing_tensors(traced: TracedGraph) -> tuple[int, ...]:
    return tuple(
        i
        for i, node in enumerate(traced.placeholders)
        if node.users and is_tensor(node) and not is_cache_input(node.name) and not is_constant(traced, node.name)
    )
