"""Static graphs of decode steps for the graph engine: one for each planned number of sequences.

A decode step has one token of each sequence, or as many more as it verifies drafts of each. Its graph has the planned
number of tokens, sequences and requested rows of logits, and block tables as wide as the longest sequence needs.
``step_padding`` pads smaller steps with dummy sequences. Other steps do not use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .....passes import TracedGraph
from .....runtime.cache.cache_specs import has_state
from .....runtime.program import KVCache
from .....runtime.step_metadata import StepMetadata
from ..flat_graph import cache_inputs, list_inputs
from ..route import Run
from ..sizes.capture_sizes import most_padding, padded_size
from ..sizes.step_padding import StepSize, spare_blocks
from .first_runs import FirstRuns
from .static_graph import why_not_static

log = logging.getLogger(__name__)

Compile = Callable[[dict[str, torch.Tensor]], Run]
"""Compiles a graph for inputs of the given sizes, placeholder by placeholder (see ``static_graph``)."""


class StaticDecode:
    """The static graphs of a lowered graph; each is compiled when it is first needed, for the caches as bound.

    Args:
        traced: the graph.
        compile: see ``Compile``.
        drafts: of each sequence, behind its newest token. Logits of all tokens are requested.

    Attributes:
        kind: name of the steps.
        refusal: why there are none, or "".
        planned: numbers of sequences that decode steps are filled up to, ascending.
        width: columns of block tables.
        graphs: number of sequences → its graph, as far as they are compiled.
        dropped: number of sequences → why its graph is not used.
        first_runs: see ``FirstRuns``.
    """

    def __init__(self, traced: TracedGraph, compile: Compile, drafts: int = 0) -> None:
        self.traced = traced
        self.drafts, self.kind = drafts, "verification" if drafts else "decode"
        self.refusal = why_not_static(traced)
        self.planned: tuple[int, ...] = ()
        self.width = 0
        self.graphs: dict[int, Run] = {}
        self.dropped: dict[int, str] = {}
        self._compile = compile
        self._lists = list_inputs(traced)
        self._at = {node.name: i for i, node in enumerate(traced.placeholders) if node.users}
        self._shapes: dict[int, list[tuple[int, torch.Size]]] = {}
        self._caches: list[torch.Tensor] = []
        self.first_runs = FirstRuns(self._leave_out, writes_state=has_state(traced.caches))
        if self.refusal:
            log.warning("%s steps have no static graphs: %s", self.kind, self.refusal)

    def plan(self, planned: Sequence[int], max_model_len: int, block_size: int) -> int:
        """Choose the sizes; the most tokens that a step is padded by.

        Args:
            planned: numbers of sequences, ascending, the most that a step has among them.
            max_model_len: tokens of the longest sequence.
            block_size: tokens per block.
        """
        if self.refusal:
            return 0
        self.planned, self.width = tuple(planned), max(1, spare_blocks(max_model_len, block_size))
        self._forget()
        self._shapes.clear()
        log.info("planned static %s graphs for %s sequences", self.kind, ", ".join(map(str, self.planned)))
        return most_padding(self.planned) * (1 + self.drafts)

    def bind(self, kv_cache: KVCache) -> None:
        """Take notice of the caches, whose sizes and addresses are part of each graph."""
        self._caches = [tensor for entry in kv_cache for tensor in entry]
        self._forget()

    def size_for(self, size: StepSize) -> StepSize | None:
        """The size of the graph that runs a step; None where none does."""
        each = 1 + self.drafts
        if self.drafts:
            fits = size.sequences < size.tokens == size.rows
        else:
            fits = size.tokens == size.sequences and 0 < size.rows <= size.sequences
        if not fits or size.blocks > self.width:
            return None
        needed = max(size.sequences, -(-size.tokens // each))
        sequences = padded_size(needed, [n for n in self.planned if n not in self.dropped])
        if sequences is None:
            return None
        dummies = sequences * each - size.tokens
        if dummies > most_padding(self.planned) * each or (dummies and sequences == size.sequences):
            return None
        return StepSize(sequences * each, sequences, sequences * each, self.width)

    def sequences_of(self, args: Sequence[Any]) -> int | None:
        """The number of sequences of the graph that takes a step's arguments as they are; None where none does.

        Args:
            args: one for each placeholder of the traced graph.
        """
        sequences, others = divmod(int(args[self._at[self.traced.input_ids]].shape[1]), 1 + self.drafts)
        if others or sequences not in self.planned or sequences in self.dropped:
            return None
        if sequences not in self._shapes:
            inputs = decode_inputs(self.traced, sequences, self.width, self.drafts)
            at = self._at
            self._shapes[sequences] = [(at[name], tensor.shape) for name, tensor in inputs.items() if name in at]
        if any(args[i].shape != shape for i, shape in self._shapes[sequences]):
            return None
        return sequences if all(len(args[i]) == sequences for i in self._lists) else None

    def graph(self, sequences: int) -> Run:
        """The graph for so many sequences, a function of the traced graph's placeholders.

        Raises:
            NotStatic: the graph cannot be given sizes; and what the toolchain raises.
        """
        if sequences not in self.graphs:
            log.info("compiling the static %s graph for %d sequences", self.kind, sequences)
            caches = zip(cache_inputs(self.traced), self._caches, strict=True)
            sizes = {**decode_inputs(self.traced, sequences, self.width, self.drafts), **dict(caches)}
            self.graphs[sequences] = self._compile(sizes)
        return self.graphs[sequences]

    def run(self, sequences: int, args: Sequence[Any]) -> Sequence[Any] | None:
        """The outputs of the graph for so many sequences; None where it turns out not to compile, and is dropped."""
        return self.first_runs.attempt(sequences, self.graph, args)

    def run_graph(self, sequences: int, args: Sequence[Any]) -> Sequence[Any]:
        """The outputs of the graph for so many sequences, whatever it raises."""
        return self.first_runs.run(sequences, self.graph, args)

    def _leave_out(self, sequences: int, reason: str) -> None:
        log.warning("not using the static %s graph for %d sequences: %s", self.kind, sequences, reason)
        self.drop(sequences, reason)

    def drop(self, sequences: int, reason: str) -> None:
        """Do not use the graph for so many sequences; whoever finds the reason says so."""
        self.dropped[sequences] = reason
        self.graphs.pop(sequences, None)
        self.first_runs.forget(sequences)

    def _forget(self) -> None:
        self.graphs.clear()
        self.dropped.clear()
        self.first_runs.clear()


def decode_inputs(traced: TracedGraph, sequences: int, width: int, drafts: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a decode step by placeholder, for their sizes; lists and caches are not among them.

    Args:
        traced: a lowered graph.
        sequences: how many.
        width: columns of the block table.
        drafts: of each sequence.
    """
    step = _decode_step(sequences, width, drafts, has_state=has_state(traced.caches))
    tokens = torch.zeros(1, sequences * (1 + drafts), dtype=torch.int64)
    found = {name: tokens for name in (traced.input_ids, traced.position_ids) if name}
    for name in traced.step_inputs:
        if isinstance(tensor := step.field(name), torch.Tensor):
            found[name] = tensor
    return found


def _decode_step(sequences: int, width: int, drafts: int, *, has_state: bool) -> StepMetadata:
    each = 1 + drafts
    tokens, lens = torch.arange(sequences * each), torch.full((sequences,), each, dtype=torch.int32)
    slots = torch.arange(sequences, dtype=torch.int32) if has_state else None
    return StepMetadata(
        slot_mapping=tokens,
        block_table=torch.zeros(sequences, width, dtype=torch.int32),
        query_start_loc=torch.arange(sequences + 1, dtype=torch.int32) * each,
        seq_lens=lens,
        logits_rows=tokens,
        token_lengths=torch.arange(1, each + 1).repeat(sequences),
        state_read=slots if slots is None else torch.full_like(slots, -1),
        state_write=slots,
    )
