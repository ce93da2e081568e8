"""Programs with two graphs for an NPU: one for steps of one token per sequence, and one for all others.

Both have the same inputs and caches (``passes.lower.npu.decode_graph``), and each step runs its own graph. Steps at
sizes of the decode graph that were found wrong use the calls of the other one. On the inference chip, whose operator
takes no more, the decode graph is for 256 sequences of 65536 tokens at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ....passes import TracedGraph
from ....runtime.npu_target import Product
from ....runtime.ops.npu.limits.incremental_attention import MOST_KEYS, MOST_SEQUENCES
from ....runtime.parallel.group import RankGroup
from ....runtime.program import KVCache
from ....runtime.step_metadata import StepMetadata
from .route import PlannedSize, Route, Run
from .sizes.step_padding import StepSize
from .warm_up.steps import StepShape


def is_decode_step(query_lens: Sequence[int], state_reads: Sequence[int], tokens: int) -> bool:
    """True if each of the step's ``tokens`` is the only one of its sequence, which goes on from a state where the
    model keeps any, and sequences without tokens stand behind these."""
    return query_lens[:tokens].count(1) == tokens and min(state_reads[:tokens], default=0) >= 0


class StepKinds:
    """Tells by a graph's inputs which kind of step they are of.

    Args:
        traced: the graph.
    """

    def __init__(self, traced: TracedGraph) -> None:
        names = [node.name for node in traced.placeholders]
        self._ids, self._lens = names.index(traced.input_ids), names.index("query_lens")
        self._reads = names.index("state_reads") if "state_reads" in names else None
        self._table = names.index("block_table") if "block_table" in names else None
        assert traced.npu is not None
        self._block_size = traced.npu.block_size
        self._is_limited = traced.npu.product is Product.INFERENCE

    def is_decode(self, args: Sequence[Any]) -> bool:
        """See ``is_decode_step``; False for more than the chip's operator takes."""
        reads = () if self._reads is None else args[self._reads]
        table = None if self._table is None else args[self._table]
        return self.fits(table) and is_decode_step(args[self._lens], reads, args[self._ids].shape[1])

    def fits(self, block_table: torch.Tensor | None) -> bool:
        """True if the chip's operator takes that many sequences, of as many tokens as their blocks hold."""
        if block_table is None or not self._is_limited:
            return True
        sequences, blocks = block_table.shape
        return sequences <= MOST_SEQUENCES and blocks * self._block_size <= MOST_KEYS


class DecodeCalls:
    """A function of a graph's inputs that runs decode steps by the calls of another.

    Args:
        traced: the graph.
        graph: of the same inputs, for decode steps.
        decode: runs that one.
        others: runs ``traced``.

    Attributes:
        graph, decode: as given.
    """

    def __init__(self, traced: TracedGraph, graph: TracedGraph, decode: Run, others: Run) -> None:
        self.graph, self.decode = graph, decode
        self._kinds, self._others = StepKinds(traced), others

    def __call__(self, *args: Any) -> Sequence[Any]:
        return (self.decode if self._kinds.is_decode(args) else self._others)(*args)


class DecodeRoute(Route):
    """Two routes: decode steps take the first, all others the second.

    Args:
        decode: of the graph for decode steps.
        others: of the graph for any; its calls, one by one, are what the sizes of both are compared with.
    """

    def __init__(self, decode: Route, others: Route) -> None:
        super().__init__(others.traced, others.eager)
        self.name = others.name
        self.decode, self.others = decode, others
        self._kinds = StepKinds(others.traced)
        for part in self._parts:
            part.eager_steps = self.eager_steps
            self.dropped_schedules.update(part.dropped_schedules)
            part.dropped_schedules = self.dropped_schedules

    @property
    def limits(self) -> list[str]:
        """Those of both."""
        kinds = zip(("decode steps", "other steps"), self._parts, strict=True)
        return [f"{kind}: {limit}" for kind, part in kinds for limit in part.limits]

    @property
    def failure(self) -> str:
        return self.decode.failure or self.others.failure

    @property
    def _parts(self) -> tuple[Route, Route]:
        return self.decode, self.others

    def plan(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> int:
        self.decode.reserve(max_num_seqs, min(max_num_seqs, max_num_batched_tokens), max_model_len)
        self.others.reserve(max_num_seqs, max_num_batched_tokens, max_model_len, self._num_drafts)
        return max(part.most_dummies for part in self._parts)

    def reserve(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> int:
        reserved = super().reserve(max_num_seqs, max_num_batched_tokens, max_model_len, num_drafts)
        for part in self._parts:
            part.reserve_like(self)
        return reserved

    def join(self, group: RankGroup | None) -> None:
        super().join(group)
        for part in self._parts:
            part.join(group)

    def bind(self, kv_cache: KVCache) -> None:
        super().bind(kv_cache)
        for part in self._parts:
            part.bind(kv_cache)

    def note_warm(self) -> None:
        super().note_warm()
        for part in self._parts:
            part.note_warm()

    def planned_sizes(self) -> list[PlannedSize]:
        """Those of both; each is exercised by the steps that it is for."""
        found = []
        for part in self._parts:
            is_decode = part is self.decode
            for size in part.planned_sizes():
                own = [shape for shape in size.shapes if (shape.tokens == shape.sequences) == is_decode]
                if is_decode and not own:  # a graph that takes any step, beside those of fixed sizes
                    own = [StepShape(shape.sequences, shape.sequences) for shape in size.shapes]
                if own:  # as often as was planned: the later runs have other lengths
                    found.append(replace(size, shapes=tuple(own * (len(size.shapes) // len(own)))))
        return found

    def size_for(self, size: StepSize) -> StepSize | None:
        """See ``Route``; a step with as many tokens as sequences is one of decode."""
        return (self.decode if size.tokens == size.sequences else self.others).size_for(size)

    def fit(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata
    ) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
        return self._part(step).fit(input_ids, position_ids, step)

    def mode(self, step: StepMetadata) -> str:
        part = self._part(step)
        return f"{'decode steps' if part is self.decode else 'other steps'}: {part.mode(step)}"

    def _part(self, step: StepMetadata) -> Route:
        is_decode = is_decode_step(step.query_lens, step.state_reads, step.slot_mapping.shape[0])
        return self.decode if is_decode and self._kinds.fits(step.block_table) else self.others

    def __call__(self, *args: Any) -> Sequence[Any]:
        return (self.decode if self._kinds.is_decode(args) else self.others)(*args)
