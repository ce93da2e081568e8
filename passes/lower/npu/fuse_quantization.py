"""Roundings to int8 by the operators in front of them.

Level 2.

Matches:
    y, _, x = npu_add_rms_norm(a, b, gamma)            # all that reads y is the rounding
    npu_dynamic_quant(y)
    npu_dynamic_quant(npu_swiglu(x))                   # likewise
Becomes:
    npu_add_rms_norm_dynamic_quant(a, b, gamma, output_mask=[True, False])
    npu_dequant_swiglu_quant(x, activate_left=True, quant_mode=1)
Why it is faster:
    one launch in place of two, and the numbers are not written in 16 bits and read again.

A norm that a router reads too stays: the fused operator does not yield it. The fused operators round the exact
numbers, the others those that were rounded to 16 bits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ...graph.data_movement import RESHAPES
from ...graph.fx_nodes import argument, callee, shape
from ...graph.record import PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.traced import TracedGraph
from .call import Call
from .limits import violations

_aten, _npu = torch.ops.aten, torch.ops.npu


def fuse_npu_quantization(traced: TracedGraph) -> PassRecord:
    """Let norms and gated activations round their results where nothing else reads these."""

    def step(node: fx.Node) -> str | None:
        if node.target is not _npu.npu_dynamic_quant.default or node.kwargs:
            return None
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shared = len(source.users) > 1
        while callee(source) in RESHAPES:
            source = source.args[0]  # type: ignore[assignment]
            shared = shared or len(source.users) > 1
        if callee(source) == "getitem" and source.args[0].target is _npu.npu_add_rms_norm.default:  # type: ignore[union-attr]
            return "something else reads the norm, too" if shared else _fuse_norm(traced, node, source)
        if source.target is _npu.npu_swiglu.default:
            return "something else reads the activation, too" if shared else _fuse_swiglu(traced, node, source)
        return None

    return rewrite_each(traced, "fuse_npu_quantisation", step)


def _fuse_norm(traced: TracedGraph, rounding: fx.Node, normed: fx.Node) -> str:
    norm: Any = normed.args[0]
    if normed.args[1] != 0:
        return "it is the sum that is rounded"
    others = [user for user in norm.users if user is not normed]
    if any(user.args[1] != 2 for user in others):
        return "something else reads the statistics of the norm"
    given = {"epsilon": argument(norm, 3, "epsilon", 1e-6), "output_mask": [True, False]}
    overload = _npu.npu_add_rms_norm_dynamic_quant.default
    reason = _illegal(traced, overload, *norm.args[:3], **given)
    if reason:
        return reason
    with traced.before(norm):
        results = traced.call(overload, *norm.args[:3], **given)
        total = traced.call(operator.getitem, results, 2)
    for user in others:
        traced.substitute(user, total)
    _replace_roundings(traced, rounding, results, 3)
    return ""


def _fuse_swiglu(traced: TracedGraph, rounding: fx.Node, activation: fx.Node) -> str:
    whole: Any = activation.args[0]
    if argument(activation, 1, "dim", -1) not in (-1, len(shape(whole)) - 1):
        return "gate and up do not lie along the last dim"
    given: dict[str, Any] = {"activate_left": True, "quant_mode": 1}
    overload = _npu.npu_dequant_swiglu_quant.default
    with traced.before(rounding):
        rows = _as_matrix(traced, whole)
        counts = _counts_of_groups(rounding)
        if counts is not None and not _illegal(traced, overload, rows, **given, group_index=counts):
            given["group_index"] = counts
        reason = _illegal(traced, overload, rows, **given)
        if reason:
            return reason
        results = traced.call(overload, rows, **given)
    _replace_roundings(traced, rounding, results, 1)
    return ""


def _counts_of_groups(rounding: fx.Node) -> fx.Node | None:
    """The counts of the groups that the rows of a rounding come in; None where they are no experts'."""
    for result in rounding.users:
        for user in result.users:
            if user.target is _npu.npu_grouped_matmul.default and user.kwargs.get("group_list_type") == 1:
                return user.kwargs["group_list"]  # type: ignore[return-value]
    return None


def _as_matrix(traced: TracedGraph, whole: fx.Node) -> fx.Node:
    """A tensor as rows; what it was a view of, where that is a matrix."""
    size = shape(whole)[-1]
    source: Any = whole
    while callee(source) in RESHAPES:
        source = source.args[0]
        if len(shape(source)) == 2 and shape(source)[-1] == size:
            return source  # type: ignore[no-any-return]
    return whole if len(shape(whole)) == 2 else traced.call(_aten.reshape.default, whole, [-1, int(size)])


def _replace_roundings(traced: TracedGraph, rounding: fx.Node, results: fx.Node, scale_at: int) -> None:
    """Let the first and a later result of ``results`` stand for the numbers and the scales of a rounding."""
    for user in list(rounding.users):
        sizes = [-1, int(shape(user)[-1])] if user.args[1] == 0 else [-1]
        with traced.before(user):
            item = traced.call(operator.getitem, results, 0 if user.args[1] == 0 else scale_at)
            if len(shape(item)) != len(shape(user)):
                item = traced.call(_aten.reshape.default, item, sizes)
        traced.substitute(user, item)


def _illegal(traced: TracedGraph, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> str:
    assert traced.npu is not None
    reasons = violations(Call.make(overload, traced.npu, *args, **kwargs))
    return f"{overload._schema.name.partition('::')[2]}: {'; '.join(reasons)}" if reasons else ""
