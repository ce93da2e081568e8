"""The inputs of a program's graph as plain data, without the graph's fake values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...passes import TracedGraph
from ...passes.graph.cut import Runs
from ...passes.graph.evaluate import at_sizes
from ...passes.graph.fx_nodes import shape, value
from ...passes.graph.notes import Boundary, PackedWeight
from ...runtime.parallel.stage_values import StageValue
from ...runtime.program import CacheSpec, StateSpec, is_cache_input


@dataclass(frozen=True)
class Linkage:
    """A record of what each input of a graph receives.

    Attributes:
        inputs: names of all, in order.
        read: those whose values something reads.
        input_ids: name of the one for tokens.
        position_ids: likewise for positions; "" when there is none.
        step_inputs: those for the step's metadata.
        token_counts: those that receive the number of tokens.
        caches: per layer, what it stores.
        merged: input → the inputs that are its rows.
        packed: inputs that are held in another layout.
        folded: constants that others were computed from.
        max_model_len: positions that the model supports, or None.
        vocab_size: columns of the logits.
        device: where the graph runs.
        block_size: tokens per cache block that it was lowered for; None for any.
        rope_switch: see ``runtime.program.Program``, as for the next.
        restart_length: likewise.
        ranks: processes that run it together.
        cuts: of the inputs that receive a rank's part of a tensor, each dim that is cut and the runs of indices that
            each rank holds (``Cut.runs``).
        boundaries: where the stages of a pipeline begin, but for the first, in the graph of all of them.
        hidden: size and dtype of the hidden rows that the graph yields behind the logits; None: it yields none.
        held: of ``caches``, the indices of those that this process holds; None: all. This and the next two are of the
            graph of one stage (``link.stages``).
        received: what it receives of the stage before; the last of ``inputs``.
        sent: its outputs, for the stage behind; () where it yields the logits.
    """

    inputs: tuple[str, ...]
    read: frozenset[str]
    input_ids: str
    position_ids: str
    step_inputs: tuple[str, ...]
    token_counts: tuple[str, ...]
    caches: tuple[CacheSpec | StateSpec, ...]
    merged: Mapping[str, tuple[str, ...]]
    packed: tuple[PackedWeight, ...]
    folded: tuple[str, ...]
    max_model_len: int | None
    vocab_size: int
    device: torch.device
    block_size: int | None
    rope_switch: int | None
    restart_length: int | None
    ranks: int = 1
    cuts: Mapping[str, tuple[tuple[int, Runs], ...]] = field(default_factory=dict)
    boundaries: tuple[Boundary, ...] = ()
    hidden: tuple[int, torch.dtype] | None = None
    held: frozenset[int] | None = None
    received: tuple[StageValue, ...] = ()
    sent: tuple[StageValue, ...] = ()

    @classmethod
    def of(cls, traced: TracedGraph, restart_length: int | None = None) -> Linkage:
        """Read it off a rewritten graph.

        Args:
            traced: the graph.
            restart_length: as the model behind it asks for, see ``verify.cache_restart``.

        Raises:
            ValueError: an input is neither a tensor nor the number of tokens.
        """
        nodes = traced.placeholders
        merged = traced.notes.merged
        known = {traced.input_ids, traced.position_ids, *traced.step_inputs, *traced.constants}
        known |= traced.notes.made_when_linked
        token_counts = tuple(n.name for n in nodes if n.name not in known and not is_cache_input(n.name))
        for name in token_counts:
            if at_sizes(value(traced.placeholder(name)), {traced.token_symbol: 7}) != 7:
                raise ValueError(f"graph input {name} is neither a tensor nor the number of tokens")
        logits: Any = traced.output.args[0]
        return cls(
            inputs=tuple(node.name for node in nodes),
            read=frozenset(node.name for node in nodes if node.users),
            input_ids=traced.input_ids,
            position_ids=traced.position_ids,
            step_inputs=tuple(traced.step_inputs),
            token_counts=token_counts,
            caches=tuple(traced.caches),
            merged=dict(merged),
            packed=tuple(traced.notes.packed),
            folded=tuple(traced.notes.folded),
            max_model_len=traced.max_positions,
            vocab_size=int(shape(logits[0])[-1]),
            device=value(traced.placeholder(traced.input_ids)).device,
            block_size=None if traced.npu is None or not traced.caches else traced.npu.block_size,
            rope_switch=traced.notes.rope_switch,
            restart_length=restart_length,
            ranks=traced.ranks,
            cuts={name: tuple((c.dim, c.runs) for c in part.cut.each()) for name, part in traced.notes.parts.items()},
            boundaries=traced.notes.boundaries,
            hidden=(int(shape(logits[1])[-1]), value(logits[1]).dtype) if len(logits) > 1 else None,
        )
