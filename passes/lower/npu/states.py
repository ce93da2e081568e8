"""Convolutions and recurrences with state, for Ascend.

Matches:
    pagoda::causal_conv1d(x, weight, bias, activation, state, query_start_loc, state_read, state_write)
    pagoda::linear_recurrence(query, key, value, log_decay, beta, ..., state, ...); pagoda::selective_scan(...)
Becomes:
    before = index_select(state, state_read)          # zeros for sequences that begin
    y, after = ATen operators of (x, before)
    npu_scatter_nd_update_(state, state_write, after)
or, for the prompts of a gated delta rule in bfloat16 where calls are captured as they are or made one by one,
    y, after = npu_chunk_gated_delta_rule(q, k, v, beta, initial_state=before, g=log_decay, ...)
and steps of one token per sequence have forms of their own (``decode_states``).
Why it is faster:
    only the slots of the step's sequences are read and written. The pool of states stays a whole graph input that is
    written once, where it lies.

Level 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ....runtime.npu_target import Product
from ....runtime.ops.state.chunked_recurrence import chunk_width, chunked_recurrence
from ....runtime.ops.state.chunked_scan import SCAN_CHUNK, chunked_scan
from ....runtime.ops.state.gathered_states import gathered_causal_conv1d, states_before
from ....runtime.state_tables import CHUNK_TABLES, CONVOLUTION_TABLES
from ...graph.fx_nodes import callee, shape, value
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph, UnsupportedModel
from .decode_states import normalize, note_input, note_step, unit_gain, why_no_recurrent_operator
from .delta_rule_probe import why_wrong
from .site import Lowering, Site, lower_each

_pagoda, _npu, _aten = torch.ops.pagoda, torch.ops.npu, torch.ops.aten
_FUSED_TAPS = 3
_GATES = frozenset({"add.Tensor", "mul.Tensor", "softplus", "neg"})


def lower_npu_states(traced: TracedGraph) -> PassRecord:
    """Lower every operator with state of the graph.

    Raises:
        UnsupportedModel: nothing writes states on the chip.
    """
    return lower_each(traced, "lower_npu_states", _LOWERINGS)


def _causal_conv1d(
    site: Site,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    activation: str,
    state: fx.Node,
    query_start_loc: fx.Node,
    state_read: fx.Node,
    state_write: fx.Node,
) -> fx.Node:
    site.refuse("npu.npu_fused_causal_conv1d", _why_no_fused_convolution(site, weight, activation))
    traced = site.traced
    tables = [traced.step_input(name, int(shape(weight)[1])) for name in CONVOLUTION_TABLES]
    taps = site.inline(lambda w: w.t().to(torch.promote_types(w.dtype, torch.float32)).contiguous(), weight)
    inputs = [note_input(traced, name, node) for name, node in (("x", x), ("taps", taps), ("bias", bias))]
    result, after = site.inline(gathered_causal_conv1d, *inputs, activation, state, state_read, *tables)
    note_step(traced, result, "causal_conv1d", activation=activation)
    _write(site, state, state_write, after)
    return result


def _linear_recurrence(
    site: Site,
    query: fx.Node,
    key: fx.Node,
    val: fx.Node,
    log_decay: fx.Node,
    beta: fx.Node | None,
    scale: float,
    l2norm_eps: float | None,
    state: fx.Node,
    *where: fx.Node,
) -> fx.Node:
    _, state_read, state_write = where
    traced, tensors = site.traced, {"query": query, "key": key, "value": val, "log_decay": log_decay, "beta": beta}
    _widen_parameters(traced, log_decay)
    inputs: Any = [note_input(traced, name, node) for name, node in tensors.items()]
    if l2norm_eps is not None:  # the single-token form reads them, from inputs that all graphs share
        unit_gain(traced, int(shape(key)[3]), scale), unit_gain(traced, int(shape(key)[3]), 1.0)
    q, k, v, g, b = inputs
    fused = _fused_delta_rule(site, q, k, v, g, b, scale, l2norm_eps, state, where)
    if fused is not None:
        result, after = fused
        after = site.cast(after, value(state).dtype)
    else:
        tables = [traced.step_input(name, chunk_width(value(log_decay))) for name in CHUNK_TABLES]
        result, after = site.inline(chunked_recurrence, *inputs, scale, l2norm_eps, state, state_read, *tables)
    note_step(traced, result, "linear_recurrence", scale=scale, l2norm_eps=l2norm_eps)
    _write(site, state, state_write, after)
    return result


def _widen_parameters(traced: TracedGraph, node: fx.Node) -> None:
    """Let sums and products on the way to ``node`` read parameters in the dtype of their results: that is computed
    ahead, where graphs of GE would cast them in every step."""
    while callee(node) in _GATES:
        operands = node.all_input_nodes
        for operand in operands:
            if operand.name in traced.constants and value(operand).dtype is not value(node).dtype:
                with traced.before(node):
                    wide = traced.call(_aten._to_copy.default, operand, dtype=value(node).dtype)
                node.replace_input_with(operand, wide)
        others = [operand for operand in operands if operand.op == "call_function"]
        if len(others) != 1:
            return
        (node,) = others


def _fused_delta_rule(
    site: Site,
    query: fx.Node,
    key: fx.Node,
    val: fx.Node,
    log_decay: fx.Node,
    beta: fx.Node | None,
    scale: float,
    l2norm_eps: float | None,
    state: fx.Node,
    where: tuple[fx.Node, ...],
) -> tuple[fx.Node, fx.Node] | None:
    """Results and states by the vendor's operator; None, with the reasons, where it is not legal."""
    chunked = "npu.npu_chunk_gated_delta_rule"
    if beta is None:
        site.refuse(chunked, "it is the delta rule, and this recurrence has no beta")
        return None
    if reason := why_no_recurrent_operator(site.target):
        site.refuse("npu.npu_recurrent_gated_delta_rule", reason)
    if len(shape(log_decay)) != 3:
        site.refuse(chunked, "it knows no decay of each key channel, or of a head for all tokens alike")
        return None
    if site.target.tried_on and (reason := why_wrong("npu_chunk_gated_delta_rule", site.target.tried_on)):
        site.refuse(chunked, reason)
        return None
    dtype = value(val).dtype
    before, lens = site.inline(_started_states, state, dtype, *where[:2])
    tensors = query, key, val, site.cast(beta, dtype), site.cast(log_decay, torch.float32)
    rows = [site.dense(site.inline(lambda x: x.reshape(-1, *x.shape[2:]), x)) for x in tensors]
    q, k, v, b, g = (*(normalize(site.traced, x, l2norm_eps, 1.0) for x in rows[:2]), *rows[2:])
    results = site.call(
        _npu.npu_chunk_gated_delta_rule.default,
        q,
        k,
        v,
        beta=b,
        initial_state=before,
        actual_seq_lengths=lens,
        scale=scale,
        g=g,
    )
    if results is None:
        return None
    rows_out = site.traced.call(_aten.unsqueeze.default, site.item(results, 0), 0)
    return rows_out, site.item(results, 1)


def _started_states(
    state: torch.Tensor, dtype: torch.dtype, query_start_loc: torch.Tensor, state_read: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States that sequences go on from, and how many tokens each has, int32."""
    return states_before(state, state_read).to(dtype), query_start_loc[1:] - query_start_loc[:-1]


def _selective_scan(
    site: Site,
    x: fx.Node,
    dt: fx.Node,
    A: fx.Node,
    B: fx.Node,
    C: fx.Node,
    round_state: bool,
    state: fx.Node,
    query_start_loc: fx.Node,
    state_read: fx.Node,
    state_write: fx.Node,
) -> fx.Node:
    tables = [site.traced.step_input(name, SCAN_CHUNK) for name in CHUNK_TABLES]
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    inputs = [note_input(site.traced, name, node) for name, node in tensors.items()]
    result, after = site.inline(chunked_scan, *inputs, round_state, state, state_read, *tables)
    note_step(site.traced, result, "selective_scan", round_state=round_state)
    _write(site, state, state_write, after)
    return result


def _write(site: Site, state: fx.Node, state_write: fx.Node, after: fx.Node) -> None:
    """Put the states behind the step into their slots, all at once: a second write would make the engine copy the
    pool."""
    place = site.traced.call(_aten.unsqueeze.default, state_write, -1)
    if site.call(_npu.npu_scatter_nd_update_.default, state, place, after) is None:
        what = f"no operator of {site.target.soc} writes the states of {site.node.name} ({site.node.target}): "
        what += f"npu_scatter_nd_update_: {site.refused[-1][1]}"
        if site.target.counted(value(after).dtype) is torch.bfloat16:
            what += "; give dtype='float16'"
        raise UnsupportedModel(what)


def _why_no_fused_convolution(site: Site, weight: fx.Node, activation: str) -> str:
    """The reason why the vendor's convolution, of Ascend950 alone, is not called."""
    taps = int(shape(weight)[1])
    if site.target.product is not Product.A5:
        return f"{site.target.soc} does not run it"
    if taps != _FUSED_TAPS:
        return f"it has {_FUSED_TAPS} taps, not {taps}"
    if activation:
        return f"it ignores its activation, here {activation}"
    return "it writes the slot that it reads, and a step may read a snapshot that has to stay"


_LOWERINGS: dict[Any, Lowering] = {
    _pagoda.causal_conv1d.default: _causal_conv1d,
    _pagoda.linear_recurrence.default: _linear_recurrence,
    _pagoda.selective_scan.default: _selective_scan,
}
