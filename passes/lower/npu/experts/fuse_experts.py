"""Gated activations of experts, and the rounding of their results, by the product in front of them.

Level 2.

Matches:
    h = npu_grouped_matmul([rows], [Up8 or Up4], scale=[S], per_token_scale=[s], group_list=counts)    # rows of int8
    q, t = npu_dequant_swiglu_quant(h, activate_left=True, quant_mode=1), or npu_dynamic_quant(npu_swiglu(h))
Becomes:
    q, t = npu_grouped_matmul_swiglu_quant_v2(rows, [Up8], [S], s, counts)       # of 4 bits also with their sums,
                                                                                 # and dequant_mode=1 for groups
Why it is faster:
    one launch instead of two or three, and gate and up are not written in 16 bits and read again.

The fused operator keeps float32 from the exact sums to the rounding, and its scales may be float32: those of bfloat16
that nothing else reads are made so. On A2 and A3 it reads int8 in FRACTAL_NZ alone, so that its matrices must be
graph inputs that nothing else reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .....runtime.ops.npu.limits import violations
from ....graph.fx_nodes import argument, callee, shape, value
from ....graph.record import PassRecord
from ....graph.rewrite_each import rewrite_each
from ....graph.traced import TracedGraph
from ..call import Call

_aten, _npu = torch.ops.aten, torch.ops.npu
_FUSED = _npu.npu_grouped_matmul_swiglu_quant_v2.default


def fuse_npu_experts(traced: TracedGraph) -> PassRecord:
    """Let products of experts activate and round their results where nothing else reads these."""

    def step(node: fx.Node) -> str | None:
        whole = _gated(node)
        product: Any = whole.args[0] if whole is not None and callee(whole) == "getitem" else None
        if product is None or product.target is not _npu.npu_grouped_matmul.default or "scale" not in product.kwargs:
            return None
        if len(whole.users) > 1 or len(product.users) > 1:  # type: ignore[union-attr]
            return "something else reads the product, too"
        return _fuse(traced, node, product)

    return rewrite_each(traced, "fuse_npu_experts", step)


def _gated(node: fx.Node) -> fx.Node | None:
    """The gates and ups of which a node rounds the activation; None where it does something else."""
    source = node.args[0] if node.args else None
    if node.target is _npu.npu_dequant_swiglu_quant.default:
        given = {name: found for name, found in node.kwargs.items() if name != "group_index"}
        return source if given == {"activate_left": True, "quant_mode": 1} else None  # type: ignore[return-value]
    if node.target is not _npu.npu_dynamic_quant.default or node.kwargs or not isinstance(source, fx.Node):
        return None
    if source.target is not _npu.npu_swiglu.default or len(source.users) > 1:
        return None
    whole = source.args[0]
    assert isinstance(whole, fx.Node)
    return whole if argument(source, 1, "dim", -1) in (-1, len(shape(whole)) - 1) else None


def _fuse(traced: TracedGraph, node: fx.Node, product: Any) -> str:
    given = product.kwargs
    (rows,), (weight,) = product.args[0], product.args[1]
    (scale,), bias = given["scale"], given.get("bias")
    if weight.op != "placeholder" or set(weight.users) != {product}:
        return "something else reads the matrices, too, which have to be in FRACTAL_NZ"
    more: dict[str, Any] = {"group_list_type": given["group_list_type"]}
    if value(weight).dtype is torch.int32:
        more["weight_assist_matrix"] = bias
    elif bias is not None:
        return "npu_grouped_matmul_swiglu_quant_v2: it takes no bias"
    assert traced.npu is not None
    with traced.before(node):
        stands = scale
        if len(shape(scale)) == 3 and int(shape(scale)[1]) > 1:
            more["dequant_mode"] = 1
        elif len(shape(scale)) == 3:
            stands = traced.call(_aten.reshape.default, scale, [int(shape(scale)[0]), int(shape(scale)[2])])
        args = (rows, [weight], [stands], given["per_token_scale"][0], given["group_list"])
        reasons = violations(Call.make(_FUSED, traced.npu, *args, **more))
        if reasons:
            if stands is not scale:
                traced.graph.erase_node(stands)
            return f"npu_grouped_matmul_swiglu_quant_v2: {'; '.join(reasons)}"
        new = traced.call(_FUSED, *args, **more)
    node.replace_all_uses_with(new)
    traced.graph.erase_node(node)
    _erase(traced, product)
    _widen(traced, scale, new)
    return ""


def _erase(traced: TracedGraph, node: fx.Node) -> None:
    """Take a node and all that reads it out."""
    for user in list(node.users):
        _erase(traced, user)
    traced.graph.erase_node(node)


def _widen(traced: TracedGraph, scale: fx.Node, reader: fx.Node) -> None:
    """Let scales that linking makes for one operator be float32."""
    if set(scale.users) != {reader} or value(scale).dtype is not torch.bfloat16:
        return
    quantized = traced.notes.quantized
    for i, inputs in enumerate(quantized):
        if inputs.scales == scale.name:
            quantized[i] = replace(inputs, scale_dtype=torch.float32)
            with traced.fake_mode:
                scale.meta["example_value"] = scale.meta["example_value"].float()
