"""Activations for Ascend, gated and plain.

Matches:
    pagoda::gated_activation(gate, up, kind, ...), pagoda::activation(x, kind)
    (silu(gate in float32) * up) in their 16 bits        # of gated norms
Becomes:
    npu_swiglu(cat(gate, up)), whose kernel widens them and rounds once, too
    npu_swiglu(whole), npu_geglu(whole), npu_clipped_swiglu(whole)    # gate and up are the halves of one product
    npu_gelu, npu_fast_gelu, or the unfused ATen operators
Why it is faster:
    one launch, and the halves are not cut out first. A plain aten.gelu is not emitted: on these chips it is the tanh
    form whichever one is requested.

Level 0.
"""

from __future__ import annotations

import torch
from torch import fx

from ....runtime.ops.gated_activation import activation_reference, gated_activation_reference
from ...graph.fx_nodes import callee, value
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph
from .site import Site, lower_each
from .slices import whole_of_halves

_pagoda, _npu, _aten = torch.ops.pagoda, torch.ops.npu, torch.ops.aten


def lower_npu_activations(traced: TracedGraph) -> PassRecord:
    """Lower every activation of the graph."""
    lowerings = {_pagoda.gated_activation.default: lower_gated, _pagoda.activation.default: _activation}
    return lower_each(traced, "lower_npu_activations", lowerings)


def lower_gated(site: Site, gate: fx.Node, up: fx.Node, kind: str, alpha: float, limit: float) -> fx.Node:
    """``act(gate) * up``."""
    fused = _gated_whole(site, whole_of_halves(gate, up), kind, alpha, limit)
    if fused is not None:
        return fused
    if kind == "clipped_swiglu":
        return site.inline(gated_activation_reference, gate, up, kind, alpha, limit)
    return site.aten(_aten.mul.Tensor, lower_activation(site, gate, kind), up)


def _gated_whole(site: Site, whole: fx.Node | None, kind: str, alpha: float, limit: float) -> fx.Node | None:
    """The fused operator over ``[gate, up]``; None where there is none."""
    if kind == "silu":
        name = "npu.npu_swiglu"
    elif kind in ("gelu", "gelu_tanh"):
        name = "npu.npu_geglu"
    elif kind == "clipped_swiglu":
        name = "npu.npu_clipped_swiglu"
    else:
        site.refuse("a fused gated activation", f"there is none for {kind}")
        return None
    if whole is None:
        site.refuse(name, "gate and up are not the halves of one tensor")
        return None
    whole = site.dense(whole)
    if kind == "silu":
        return site.call(_npu.npu_swiglu.default, whole, -1)
    if kind == "clipped_swiglu":
        return site.call(
            _npu.npu_clipped_swiglu.default, whole, alpha=alpha, limit=limit, bias=1.0, interleaved=False
        )
    both = site.call(_npu.npu_geglu.default, whole, -1, int(kind == "gelu_tanh"), True)
    return None if both is None else site.item(both, 0)


def _activation(site: Site, x: fx.Node, kind: str) -> fx.Node | None:
    found = _wide_gate(site.node, x) if kind == "silu" else None
    if found is not None:
        gate, up, result = found
        with site.traced.before(result):
            whole = site.aten(_aten.cat.default, [gate, up], -1)
            fused = site.call(_npu.npu_swiglu.default, whole, -1)
        if fused is not None:
            site.traced.substitute(result, fused)
            return None
        site.retry()
    return lower_activation(site, x, kind)


def _wide_gate(activation: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Gate and up, of 16 bits, and the node that rounds their product, where ``activation`` widens the gate."""
    product = next(iter(activation.users))
    if callee(x) != "_to_copy" or len(activation.users) > 1 or callee(product) != "mul.Tensor":
        return None
    gate, (up,) = x.args[0], [n for n in product.all_input_nodes if n is not activation] or (x,)
    result = next(iter(product.users))
    if len(product.users) > 1 or callee(result) != "_to_copy":
        return None
    tensors = [value(node) for node in (gate, up, result)]
    alike = {(tensor.dtype, str(tuple(tensor.shape))) for tensor in tensors}
    is_wide = value(activation).dtype is torch.float32 and tensors[0].dtype in (torch.bfloat16, torch.float16)
    return (gate, up, result) if len(alike) == 1 and is_wide else None  # type: ignore[return-value]


def lower_activation(site: Site, x: fx.Node, kind: str) -> fx.Node:
    """``act(x)``."""
    new: fx.Node | None = None
    if kind in ("gelu", "gelu_tanh"):
        new = site.call(_npu.npu_gelu.default, x, approximate="tanh" if kind == "gelu_tanh" else "none")
    elif kind == "quick_gelu":
        new = site.call(_npu.npu_fast_gelu.default, x)
    return new or site.inline(activation_reference, x, kind)
