"""Mixtures of experts for Ascend.

Matches:
    weights, ids = pagoda::moe_gating(logits, ...)
    pagoda::moe(x, weights, ids, up, down, ...)
Becomes:
    npu_moe_gating_top_k_softmax, its second version for softmaxes over the chosen, or npu_moe_gating_top_k for
    sigmoid scores with groups
    npu_moe_init_routing_v2 -> npu_grouped_matmul -> npu_swiglu -> npu_grouped_matmul
    -> npu_moe_token_unpermute, or npu_moe_finalize_routing in GE graphs
        which adds what is added to its result, such as shared experts, as skip1
        or, on the inference chip, which has neither, the rows gathered and added in float32
    or, where these are not legal, every expert over every token, in batched ATen products
    of one rank's experts: only their rows are sorted (active_expert_range, a number in the graph of each rank), and
        npu_moe_finalize_routing adds nothing for the others, whose places are -1, with drop_pad_mode 3, whose rows
        [E, C, H] are any view with at least as many experts as a token has
Why it is faster:
    rows are sorted by expert once, and each expert's rows are one part of one product.

The last two give the same sum. npu_moe_token_unpermute is what vllm-ascend runs on devices, where it reports wrong
numbers of npu_moe_finalize_routing (ops/fused_moe/moe_comm_method.py), so it is taken wherever it can be: torchair
has no GE converter for it. No document lets it take places of -1, so that the other one adds a rank's rows.

Level 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .....runtime.npu_target import Product
from .....runtime.ops.moe import moe
from .....runtime.ops.moe.every_expert import every_expert
from ....graph.fx_nodes import callee, shape, value
from ....graph.record import PassRecord
from ....graph.traced import TracedGraph
from ..activations import lower_activation, lower_gated
from ..site import Site, lower_each
from .combine import add_while_combining

_pagoda, _npu, _aten = torch.ops.pagoda, torch.ops.npu, torch.ops.aten
_ENDS, _COUNTS, _PER_ROW = 0, 1, 0
_SPLIT_ONE_OUTPUT, _GROUPS_OF_ROWS = 3, 0
_ROW_MAJOR, _ROW_MAJOR_DROPPED = 2, 3
_OVER_CHOSEN = 1
_NO_EPSILON = 1e-12
"""What added to the sum of the largest of a softmax leaves it as it is in float32."""


def lower_npu_moe(traced: TracedGraph) -> PassRecord:
    """Lower routing and experts."""
    record = lower_each(traced, "lower_npu_moe", {_pagoda.moe.default: _moe, _pagoda.moe_gating.default: _gating})
    add_while_combining(traced)
    return record


def _gating(
    site: Site,
    logits: fx.Node,
    bias: fx.Node | None,
    k: int,
    scoring: str,
    groups: int,
    topk_groups: int,
    group_scoring: str,
    weighting: str,
    epsilon: float,
    scaling: float,
) -> tuple[fx.Node, fx.Node]:
    """Weights ``[N, K]`` and ids ``[N, K]`` int64."""
    chosen: tuple[fx.Node, fx.Node] | None = None
    rounded: list[fx.Node] = []
    if scoring in ("softmax", "none") and groups == 1 and bias is None:
        narrow, rounded = (logits, []) if scaling != 1.0 else _before_widening(site, logits)
        chosen = _softmax_gating(site, logits, narrow, k, scoring, weighting, epsilon, scaling)
    elif scoring == "sigmoid" and weighting == "sum":
        results = site.call(
            _npu.npu_moe_gating_top_k.default,
            logits,
            k,
            bias=None if bias is None else site.cast(bias, value(logits).dtype),
            k_group=topk_groups,
            group_count=groups,
            group_select_mode=int(group_scoring == "top2"),
            renorm=0,
            norm_type=1,
            out_flag=False,
            routed_scaling_factor=scaling,
            eps=epsilon,
        )
        chosen = None if results is None else (site.item(results, 0), site.item(results, 1))
    else:
        site.refuse("npu.npu_moe_gating_top_k", f"{scoring} scores, weights by {weighting!r}, {groups} groups")
    if chosen is None:
        return site.inline(moe.moe_gating_reference, *site.args)  # type: ignore[no-any-return]
    weights, ids = chosen
    for cast in rounded:
        if value(weights).dtype is value(cast).dtype:
            site.traced.substitute(cast, weights)
    return site.cast(weights, value(logits).dtype), site.traced.call(_aten._to_copy.default, ids, dtype=torch.int64)


def _before_widening(site: Site, logits: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Logits as they were before a cast to float32, and the casts of the weights, where all round to that dtype.

    The operators take the softmax of bfloat16 in float32 and round it once, as the casts do.
    """
    source = logits.args[0] if callee(logits) == "_to_copy" else None
    if not isinstance(source, fx.Node) or value(source).dtype is not torch.bfloat16:
        return logits, []
    weights = [user for user in site.node.users if user.args[1] == 0]
    readers = [reader for item in weights for reader in item.users]
    if any(callee(r) != "_to_copy" or value(r).dtype is not torch.bfloat16 for r in readers):
        return logits, []
    return source, readers


def _softmax_gating(
    site: Site,
    logits: fx.Node,
    narrow: fx.Node,
    k: int,
    scoring: str,
    weighting: str,
    epsilon: float,
    scaling: float,
) -> tuple[fx.Node, fx.Node] | None:
    """Softmax and choice in one. A softmax over the chosen logits alone is the same as dividing by their sum.

    ``narrow``: the logits, or these before they were widened, for operators that round nothing but the weights.
    """
    over_chosen = scoring == "none" and weighting == "softmax"
    if not over_chosen and (scoring != "softmax" or weighting not in ("none", "sum")):
        site.refuse("npu.npu_moe_gating_top_k_softmax", f"{scoring} scores with weights by {weighting!r}")
        return None
    if scaling == 1.0 and (over_chosen or (weighting == "sum" and epsilon < _NO_EPSILON)):
        results = site.call(_npu.npu_moe_gating_top_k_softmax_v2.default, narrow, k=k, renorm=_OVER_CHOSEN)
        if results is not None:
            return site.item(results, 0), site.item(results, 1)
    one = narrow if weighting == "none" else logits
    results = site.call(_npu.npu_moe_gating_top_k_softmax.default, one, None, k)
    if results is None:
        return None
    weights, ids = site.item(results, 0), site.item(results, 1)
    if over_chosen or weighting == "sum":
        total = site.aten(_aten.sum.dim_IntList, weights, [-1], True)
        if epsilon and not over_chosen:
            total = site.aten(_aten.add.Scalar, total, epsilon)
        weights = site.aten(_aten.div.Tensor, weights, total)
    if scaling != 1.0:
        weights = site.aten(_aten.mul.Scalar, weights, scaling)
    return weights, ids


def _moe(site: Site, *args: Any) -> fx.Node:
    return _grouped(site, *args) or site.inline(every_expert, *args)


def _grouped(
    site: Site,
    x: fx.Node,
    weights: fx.Node,
    ids: fx.Node,
    up: fx.Node,
    down: fx.Node,
    up_bias: fx.Node | None,
    down_bias: fx.Node | None,
    kind: str,
    alpha: float,
    limit: float,
    layout: str,
    transposed: bool,
    weight_input: bool,
) -> fx.Node | None:
    """The chain of operators; None where one of them is not legal."""
    experts, k = int(shape(up)[0]), int(shape(ids)[1])
    fused = kind == "clipped_swiglu" or (kind == "silu" and layout == "halves" and limit <= 0) or layout == "plain"
    if weight_input and k > 1:
        site.refuse("npu.npu_grouped_matmul", f"{k} experts whose inputs are weighted")
        return None
    if not fused and layout == "interleaved":
        site.refuse("npu.npu_grouped_matmul", f"gate and up of {kind} lie in turns")
        return None
    if weight_input:
        x = site.cast(site.aten(_aten.mul.Tensor, x, weights), value(x).dtype)
    active, routes = [0, experts], experts
    if is_part := callee(ids) == "local_experts":
        ids, first = ids.args[:2]  # type: ignore[assignment]
        start = int(site.traced.constants[first.name])  # type: ignore[union-attr]
        active, routes = [start, start + experts], site.traced.ranks * experts
    ids = site.cast(_uncast(ids), torch.int32)
    by = _ENDS if site.target.product is Product.INFERENCE else _COUNTS
    routed = site.call(
        _npu.npu_moe_init_routing_v2.default,
        x,
        ids,
        active_num=-1,
        expert_num=routes,
        drop_pad_mode=0,
        expert_tokens_num_type=by,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=active,
        row_idx_type=_PER_ROW,
    )
    if routed is None:
        return None
    rows, row_of, counts = (site.item(routed, i) for i in range(3))
    if by == _ENDS:  # which an eager call yields in int32
        counts = site.traced.call(_aten._to_copy.default, counts, dtype=torch.int64)
    hidden = _product(site, rows, up, up_bias, counts, by, transposed)
    if hidden is None:
        return None
    if layout == "plain":
        hidden = lower_activation(site, hidden, kind)
    elif kind == "clipped_swiglu":
        hidden = site.call(
            _npu.npu_clipped_swiglu.default,
            hidden,
            alpha=alpha,
            limit=limit,
            bias=1.0,
            interleaved=layout == "interleaved",
        )
    elif kind == "silu" and limit <= 0:
        hidden = site.call(_npu.npu_swiglu.default, hidden, -1)
    else:
        split = site.aten(_aten.split.Tensor, hidden, int(shape(hidden)[-1]) // 2, -1)
        gate, over = site.item(split, 0), site.item(split, 1)
        if limit > 0:
            gate = site.aten(_aten.clamp.default, gate, None, limit)
            over = site.aten(_aten.clamp.default, over, -limit, limit)
        hidden = lower_gated(site, gate, over, kind, alpha, limit)
    if hidden is None:
        return None
    out = _product(site, hidden, down, down_bias, counts, by, transposed)
    if out is None:
        return None
    scales = None if weight_input else site.cast(weights, value(out).dtype)
    combined = None if is_part else site.call(_npu.npu_moe_token_unpermute.default, out, row_of, scales)
    if combined is not None:
        return combined
    combined = site.call(
        _npu.npu_moe_finalize_routing.default,
        site.aten(_aten.view.default, out, [k, -1, int(shape(out)[-1])]) if is_part else out,
        None,
        None,
        None,
        scales,
        row_of,
        None,
        drop_pad_mode=_ROW_MAJOR_DROPPED if is_part else _ROW_MAJOR,
        k=k,
    )
    return combined or site.inline(_added, out, row_of, scales, k, is_part)  # type: ignore[no-any-return]


def _uncast(ids: fx.Node) -> fx.Node:
    """Ids as a router yields them, in int32."""
    source: Any = ids.args[0] if callee(ids) == "_to_copy" else None
    return ids if source is None or value(source).dtype is not torch.int32 else source


def _added(
    rows: torch.Tensor, row_of: torch.Tensor, scales: torch.Tensor | None, k: int, is_part: bool
) -> torch.Tensor:
    """``[T, H]``, each token's rows times their scales, added in float32; of a rank's experts, nothing for places of
    -1."""
    parts = rows.index_select(0, row_of.clamp(min=0) if is_part else row_of)
    if is_part:
        parts = parts.masked_fill((row_of < 0).unsqueeze(-1), 0)
    parts = parts.view(-1, k, rows.shape[1]).float()
    if scales is not None:
        parts = parts * scales.float().unsqueeze(-1)
    return parts.sum(1).to(rows.dtype)


def _product(
    site: Site, rows: fx.Node, weight: fx.Node, bias: fx.Node | None, counts: fx.Node, by: int, transposed: bool
) -> fx.Node | None:
    """Each expert's rows by its matrix."""
    stored = weight if transposed else _as_stored(site.traced, weight)
    if stored is None:
        site.refuse("npu.npu_grouped_matmul", "the experts' matrices are computed, not parameters")
        return None
    biases = None if bias is None else [_wide(site, bias)]
    results = site.call(
        _npu.npu_grouped_matmul.default,
        [rows],
        [stored],
        bias=biases,
        group_list=counts,
        split_item=_SPLIT_ONE_OUTPUT,
        group_type=_GROUPS_OF_ROWS,
        group_list_type=by,
    )
    return None if results is None else site.item(results, 0)


def _as_stored(traced: TracedGraph, weight: fx.Node) -> fx.Node | None:
    """``[E, out, in]`` as ``[E, in, out]``: a graph input, which is laid out once, when a program is loaded.

    In the caller's own graph, which receives the parameters at every call, an operator.
    """
    if not traced.paged:
        return traced.call(_aten.transpose.int, weight, 1, 2)
    if weight.name not in traced.constants:
        return None
    stored = traced.constants[weight.name].detach()
    return traced.shared_constant(f"turned_{weight.name}", lambda: stored.transpose(1, 2))


def _wide(site: Site, bias: fx.Node) -> fx.Node:
    """A bias beside bf16 matrices must be float32."""
    traced = site.traced
    if site.target.counted(value(bias).dtype) is not torch.bfloat16 or value(bias).dtype is torch.float32:
        return bias
    if traced.paged and bias.name in traced.constants:
        traced.notes.fold((bias.name,))
        stored = traced.constants[bias.name].detach()
        return traced.shared_constant(f"wide_{bias.name}", stored.float)
    return site.cast(bias, torch.float32)
