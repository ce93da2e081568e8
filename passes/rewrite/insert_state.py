"""Give every convolution and recurrence along the tokens a state per sequence.

Matches:
    pagoda::causal_conv1d_seq(x, weight, bias, activation)           # in a flat [1, T] step; likewise
    pagoda::linear_recurrence_seq(...), pagoda::selective_scan_seq(...)
Becomes:
    pagoda::causal_conv1d(x, weight, bias, activation, conv_state_i, query_start_loc, state_read, state_write)
Why it is faster:
    a sequence goes on from what its earlier tokens left instead of computing them again, and a step holds tokens of
    many sequences.

All states form one group behind those of keys and values: a sequence has one slot in each of them.

Level 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...runtime.cache.cache_specs import num_token_groups
from ...runtime.ops.state.causal_conv1d import causal_conv1d, causal_conv1d_seq
from ...runtime.ops.state.linear_recurrence import linear_recurrence, linear_recurrence_seq
from ...runtime.ops.state.selective_scan import selective_scan, selective_scan_seq
from ...runtime.program import StateSpec
from ..graph.fx_nodes import is_dynamic, shape, value
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph


def insert_state(traced: TracedGraph) -> PassRecord:
    """Replace every operator over one whole sequence by the one that goes on from a state."""
    group = num_token_groups(traced.caches) if traced.caches else 0

    def step(node: fx.Node) -> str | None:
        found = _OPERATORS.get(node.target)
        if found is None:
            return None
        operator, state = found
        rows = shape(node.args[0])
        if is_dynamic(rows[0]) or int(rows[0]) != 1:
            return f"its batch size is {rows[0]}: the flat step must keep batch 1"
        if not is_dynamic(rows[1]):
            return f"its number of tokens is fixed at {rows[1]}"
        name, sizes, dtype = state(node)
        if any(map(is_dynamic, sizes)):
            return "the size of its state varies with the number of tokens"
        spec = StateSpec(name, tuple(map(int, sizes)), dtype, group)
        metadata = [traced.step_input(field) for field in ("query_start_loc", "state_read", "state_write")]
        (cache,) = traced.add_cache(spec)
        with traced.before(node):
            new = traced.call(operator, *node.args, cache, *metadata)
        traced.substitute(node, new)
        return ""

    record = rewrite_each(traced, "insert_state", step, list(traced.graph.nodes) if traced.paged else ())
    if record.matches:
        traced.number_caches()
    return record


def _conv_state(node: fx.Node) -> tuple[str, tuple[Any, ...], torch.dtype]:
    channels, taps = shape(node.args[1])
    return "conv_state", (taps - 1, channels), value(node.args[1]).dtype


def _matrix_state(node: fx.Node) -> tuple[str, tuple[Any, ...], torch.dtype]:
    _, key, val = node.args[:3]
    return "recurrent_state", (*shape(val)[2:], shape(key)[3]), _wide(val)


def _scan_state(node: fx.Node) -> tuple[str, tuple[Any, ...], torch.dtype]:
    return "recurrent_state", tuple(shape(node.args[2])), _wide(node.args[0])


def _wide(node: fx.Node) -> torch.dtype:
    """The dtype that the operators sum up in: float32 at least."""
    return torch.promote_types(value(node).dtype, torch.float32)


_State = Callable[[fx.Node], tuple[str, tuple[Any, ...], torch.dtype]]
_OPERATORS: dict[Any, tuple[Any, _State]] = {
    causal_conv1d_seq: (causal_conv1d, _conv_state),
    linear_recurrence_seq: (linear_recurrence, _matrix_state),
    selective_scan_seq: (selective_scan, _scan_state),
}
"""Operator over one whole sequence → the one with a state, and what that state is."""
