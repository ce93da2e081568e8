"""The base of the two ways to run a lowered graph on an NPU: they choose the sizes that it runs at."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ....passes import TracedGraph
from ....passes.graph.fx_nodes import is_tensor, value
from ....runtime.engine.device_queue import sent
from ....runtime.program import KVCache, StateSpec, is_cache_input
from ....runtime.step_metadata import StepMetadata
from .flat_graph import is_constant, list_inputs
from .step_padding import StepSize, pad_step, size_of, spare_blocks

Run = Callable[..., Sequence[Any]]
"""A function of a graph's placeholders, or of their flat form, that returns its outputs."""


class Route(ABC):
    """A function of a lowered graph's placeholders that runs steps of planned sizes.

    First ``reserve``, then ``bind``, then for each step ``fit`` and a call with the arguments of what that returned.

    Args:
        traced: a lowered graph; its constants are linked.

    Attributes:
        name: as option ``codegen`` spells it.
        lists: positions of the placeholders that receive lists of lengths.
        changing: positions of those that receive another tensor at each step.
    """

    name: str

    def __init__(self, traced: TracedGraph) -> None:
        assert traced.npu is not None
        self.traced = traced
        self.block_size = traced.npu.block_size
        self.device: torch.device = value(traced.placeholder(traced.input_ids)).device
        self.lists = list_inputs(traced)
        self.changing = _changing_tensors(traced)
        self._first_spare_block = self._spare_slot = self._spare_blocks = 0

    @abstractmethod
    def plan(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Choose the sizes for a runtime that makes no larger steps; the most tokens that one is padded by."""

    @abstractmethod
    def size_for(self, size: StepSize) -> StepSize | None:
        """The size that a step of ``size`` is filled up to; None when it runs as it is."""

    @abstractmethod
    def __call__(self, *args: Any) -> Sequence[Any]:
        """The graph's outputs. Tensors of a step may live on the host."""

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        """Plan; how many blocks at the end of each cache, and slots of each state, are for padding.

        One at least: dummy sequences without tokens name a block too.
        """
        padding = self.plan(max_num_seqs, max_num_batched_tokens, max_model_len)
        self._spare_blocks = max(1, spare_blocks(padding, self.block_size))
        return self._spare_blocks

    def bind(self, kv_cache: KVCache) -> None:
        """Take notice of the caches that later calls receive."""
        for spec, (first, *_) in zip(self.traced.caches, kv_cache, strict=True):
            if isinstance(spec, StateSpec):
                self._spare_slot = first.shape[0] - self._spare_blocks
            else:
                self._first_spare_block = first.shape[0] - self._spare_blocks

    def fit(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata
    ) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
        """Ids ``[1, T]``, positions ``[1, T]`` and metadata of a step, on the host, at the size that it runs at."""
        size = self.size_for(size_of(step))
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
