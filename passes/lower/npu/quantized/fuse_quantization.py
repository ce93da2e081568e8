"""Roundings to int8 by the operators in front of them.

Level 2.

Matches:
    y, _, x = npu_add_rms_norm(a, b, gamma)            # all that reads y is the rounding
    npu_dynamic_quant(y)
    npu_dynamic_quant(npu_swiglu(x))                   # likewise
    npu_quantize(y, scale, offset, qint8, -1, True)    # of such a norm
Becomes:
    npu_add_rms_norm_dynamic_quant(a, b, gamma, output_mask=[True, False])
    npu_dequant_swiglu_quant(x, activate_left=True, quant_mode=1)
    npu_add_rms_norm_quant(a, b, gamma, scales, offsets)     # scale and offset repeated for every element of gamma
Why it is faster:
    one launch instead of two, and the numbers are not written in 16 bits and read again.

A norm that a router reads too stays: the fused operator does not yield it. The fused operators round the exact
numbers, the others those that were rounded to 16 bits. For bfloat16 inputs, scales and offsets are bfloat16 where
that changes no number, and float32 and int32 otherwise.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .....runtime.ops.npu.limits import violations
from .....runtime.ops.npu.limits.quantized import QINT8
from ....graph.data_movement import RESHAPES
from ....graph.fx_nodes import argument, callee, shape, value
from ....graph.record import PassRecord
from ....graph.rewrite_each import rewrite_each
from ....graph.traced import TracedGraph
from ..call import Call

_aten, _npu = torch.ops.aten, torch.ops.npu


def fuse_npu_quantization(traced: TracedGraph) -> PassRecord:
    """Let norms and gated activations round their results where nothing else reads these."""

    def step(node: fx.Node) -> str | None:
        by_scale = node.target is _npu.npu_quantize.default and node.args[3:] == (QINT8, -1, True)
        if not by_scale and (node.target is not _npu.npu_dynamic_quant.default or node.kwargs):
            return None
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shared = len(source.users) > 1
        while callee(source) in RESHAPES:
            source = source.args[0]  # type: ignore[assignment]
            shared = shared or len(source.users) > 1
        is_matrix = len(shape(node.args[0])) == 2 and str(shape(node.args[0])[-1]) == str(shape(source)[-1])
        is_norm = callee(source) == "getitem" and source.args[0].target is _npu.npu_add_rms_norm.default  # type: ignore[union-attr]
        if not is_norm and (by_scale or source.target is not _npu.npu_swiglu.default):
            return None
        if shared:
            return f"something else reads the {'norm' if is_norm else 'activation'}, too"
        if not is_matrix:
            return "its rows are rounded in parts"
        if not is_norm:
            return _fuse_swiglu(traced, node, source)
        return (_fuse_norm_by_scale if by_scale else _fuse_norm)(traced, node, source)

    return rewrite_each(traced, "fuse_npu_quantization", step)


def _fuse_norm(traced: TracedGraph, rounding: fx.Node, normed: fx.Node) -> str:
    norm: Any = normed.args[0]
    reason = _reads_more(normed)
    given = {"epsilon": argument(norm, 3, "epsilon", 1e-6), "output_mask": [True, False]}
    overload = _npu.npu_add_rms_norm_dynamic_quant.default
    reason = reason or _illegal(traced, overload, *norm.args[:3], **given)
    if reason:
        return reason
    results = _in_place_of_norm(traced, normed, overload, *norm.args[:3], **given)
    _replace_roundings(traced, rounding, results, 3)
    return ""


def _fuse_norm_by_scale(traced: TracedGraph, rounding: fx.Node, normed: fx.Node) -> str:
    norm: Any = normed.args[0]
    gamma, dtype = norm.args[2], value(norm.args[0]).dtype
    assert traced.npu is not None
    numbers = [None if node is None else traced.constants[node.name] for node in rounding.args[1:3]]  # type: ignore[union-attr]
    as_inputs = traced.npu.counted(dtype) is torch.bfloat16 and all(
        number is None or torch.equal(number.to(dtype).double(), number.double()) for number in numbers
    )
    tables: list[tuple[str, torch.Tensor] | None] = []
    for node, number, exact in zip(rounding.args[1:3], numbers, (torch.float32, torch.int32), strict=True):
        if number is None:
            tables.append(None)
            continue
        table = number.to(dtype if as_inputs else exact).expand(int(shape(gamma)[0])).contiguous()
        tables.append((f"{node.name}_of_{len(table)}", table))  # type: ignore[union-attr]
    given = {"epsilon": argument(norm, 3, "epsilon", 1e-6)}
    overload = _npu.npu_add_rms_norm_quant.default
    spread = [None if table is None else table[1] for table in tables]
    reason = _reads_more(normed) or _illegal(traced, overload, *norm.args[:3], *spread, **given)
    if reason:
        return reason
    inputs = [None if table is None else traced.shared_constant(table[0], table[1].clone) for table in tables]
    results = _in_place_of_norm(traced, normed, overload, *norm.args[:3], *inputs, **given)
    with traced.before(rounding):
        item = traced.call(operator.getitem, results, 0)
        if len(shape(item)) != len(shape(rounding)):
            item = traced.call(_aten.reshape.default, item, [-1, int(shape(rounding)[-1])])
    traced.substitute(rounding, item)
    return ""


def _reads_more(normed: fx.Node) -> str:
    """Why a norm cannot become one that yields rounded numbers and the sum alone; "" where it can."""
    if normed.args[1] != 0:
        return "it is the sum that is rounded"
    others = [user for user in normed.args[0].users if user is not normed]  # type: ignore[union-attr]
    return "something else reads the statistics of the norm" if any(user.args[1] != 2 for user in others) else ""


def _in_place_of_norm(
    traced: TracedGraph, normed: fx.Node, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> fx.Node:
    """Call an operator in front of a norm, and let its third result stand for the norm's sum."""
    norm: Any = normed.args[0]
    with traced.before(norm):
        results = traced.call(overload, *args, **kwargs)
        total = traced.call(operator.getitem, results, 2)
    for user in [user for user in norm.users if user is not normed]:
        traced.substitute(user, total)
    return results


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
    """The counts of the groups that the rows of a rounding come in; None where they are not experts'."""
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
