"""Norms for Ascend.

Matches:
    pagoda::rms_norm, pagoda::add_rms_norm, pagoda::layer_norm, pagoda::add_layer_norm
Becomes:
    npu_rms_norm, npu_add_rms_norm, npu_gemma_rms_norm (scales stored less one), npu_add_layer_norm;
    aten.native_layer_norm, which the chip has an operator for; where none is legal, the unfused ATen operators
Why it is faster:
    one launch that reads its input once. The kernels compute in float32 and round once.

Level 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ....runtime.ops.norm import layer_norm, rms_norm
from ...graph.fx_nodes import shape, value
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph
from .site import Lowering, Site, lower_each

_pagoda, _npu, _aten = torch.ops.pagoda, torch.ops.npu, torch.ops.aten


def lower_npu_norms(traced: TracedGraph) -> PassRecord:
    """Lower every norm of the graph."""
    return lower_each(traced, "lower_npu_norms", _LOWERINGS)


def _rms_norm(site: Site, x: fx.Node, weight: fx.Node | None, eps: float, offset: float, rounds: bool) -> fx.Node:
    normed = _npu_rms_norm(site, x, weight, eps, offset)
    return normed or site.inline(rms_norm.rms_norm_reference, x, weight, eps, offset, rounds)


def _npu_rms_norm(site: Site, x: fx.Node, weight: fx.Node | None, eps: float, offset: float) -> fx.Node | None:
    if weight is not None and offset == 1.0:
        both = site.call(_npu.npu_gemma_rms_norm.default, x, weight, eps)
    elif offset and weight is not None:
        site.refuse("npu.npu_rms_norm", f"the scale is stored less {offset}")
        return None
    else:
        both = site.call(_npu.npu_rms_norm.default, x, _parameter(site.traced, x, weight, "ones"), eps)
    return None if both is None else site.item(both, 0)


def _add_rms_norm(
    site: Site, x: fx.Node, residual: fx.Node, weight: fx.Node | None, eps: float, offset: float, rounds: bool
) -> list[fx.Node]:
    if offset and weight is not None:
        # It takes gamma in the dtype of x1 (op-plugin's document; CANN's add_rms_norm_def.cpp).
        dtype = str(value(x).dtype).removeprefix("torch.")
        site.refuse("npu.npu_add_rms_norm", f"the scale is stored less {offset}; their sum is rounded in {dtype}")
    else:
        # The kernel yields the norm, the reciprocal of the root, and the sum.
        results = site.call(
            _npu.npu_add_rms_norm.default, x, residual, _parameter(site.traced, x, weight, "ones"), eps
        )
        if results is not None:
            return [site.item(results, 0), site.item(results, 2)]
    total = site.aten(_aten.add.Tensor, x, residual)
    return [_rms_norm(site, total, weight, eps, offset, rounds), total]


def _parameter(traced: TracedGraph, x: fx.Node, given: fx.Node | None, fill: str) -> fx.Node:
    """A scale or shift; "ones" or "zeros" where the norm has none, shared by all norms of one size."""
    if given is not None:
        return given
    size, dtype = int(shape(x)[-1]), value(x).dtype
    name = f"{fill}_{size}_{str(dtype).removeprefix('torch.')}"
    number = float(fill == "ones")
    return traced.shared_constant(name, lambda: torch.full((size,), number, dtype=dtype, device=value(x).device))


def _layer_norm(site: Site, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None, eps: float) -> fx.Node:
    dtypes = {value(n).dtype for n in (x, weight, bias) if n is not None}
    if len(dtypes) > 1:
        site.refuse("aten.native_layer_norm", "dtypes differ: " + ", ".join(sorted(map(str, dtypes))))
        return site.inline(layer_norm.layer_norm_reference, x, weight, bias, eps)
    results = site.aten(_aten.native_layer_norm.default, x, [int(shape(x)[-1])], weight, bias, eps)
    return site.item(results, 0)


def _add_layer_norm(
    site: Site, x: fx.Node, residual: fx.Node, weight: fx.Node | None, bias: fx.Node | None, eps: float
) -> list[fx.Node]:
    results = site.call(
        _npu.npu_add_layer_norm.default,
        x,
        residual,
        _parameter(site.traced, x, weight, "ones"),
        _parameter(site.traced, x, bias, "zeros"),
        eps,
        True,
    )
    if results is not None:
        return [site.item(results, 0), site.item(results, 3)]
    total = site.aten(_aten.add.Tensor, x, residual)
    return [_layer_norm(site, total, weight, bias, eps), total]


_LOWERINGS: dict[Any, Lowering] = {
    _pagoda.rms_norm.default: _rms_norm,
    _pagoda.add_rms_norm.default: _add_rms_norm,
    _pagoda.layer_norm.default: _layer_norm,
    _pagoda.add_layer_norm.default: _add_layer_norm,
}
