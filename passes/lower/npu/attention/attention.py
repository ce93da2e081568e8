"""Attention inside the user's own cache handling, for Ascend.

Matches:
    pagoda::attention(q, k, v, mask, sinks, slopes, scale, is_causal, window, chunk, softcap)     # [B, H, T, D]
Becomes:
    npu_fused_infer_attention_score(q, k, v, input_layout="BNSD", ...)
        sparse_mode 2 for a causal mask, 4 for a window, 1 for a boolean mask of the caller's, 0 without any
    npu_prompt_flash_attention(...)            # on chips without the former
    or, where neither is legal, the ATen operators of the formula
Why it is faster:
    one kernel, which keeps no scores in memory.

Level 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .....runtime.ops.npu.limits.attention import UNLIMITED
from .....runtime.ops.reference import attention_reference
from ....graph.attention_node import ATTENTION, AttentionCall
from ....graph.fx_nodes import shape, value
from ....graph.record import PassRecord
from ....graph.traced import TracedGraph
from ..site import Site, lower_each
from .paged_attention import causal_mask

_npu, _aten = torch.ops.npu, torch.ops.aten
_FREE, _GIVEN, _CAUSAL, _BAND = 0, 1, 2, 4


def lower_npu_attention(traced: TracedGraph) -> PassRecord:
    """Lower every attention that has no paged cache."""
    return lower_each(traced, "lower_npu_attention", {ATTENTION: _attention})


def _attention(site: Site, *args: Any) -> fx.Node:
    return _fused(site, AttentionCall(*args)) or site.inline(attention_reference, *args)


def _fused(site: Site, call: AttentionCall) -> fx.Node | None:
    mode, mask, reason = _masking(site, call)
    if reason:
        site.refuse("npu.npu_fused_infer_attention_score", reason)
        return None
    window = call.sliding_window
    common: dict[str, Any] = {
        "atten_mask": mask,
        "num_heads": int(shape(call.query)[1]),
        "num_key_value_heads": int(shape(call.key)[1]),
        "input_layout": "BNSD",
        "sparse_mode": mode,
        "pre_tokens": window - 1 if window else UNLIMITED,
        "next_tokens": 0 if window else UNLIMITED,
    }
    tensors = [site.dense(n) for n in (call.query, call.key, call.value)]
    results = site.call(
        _npu.npu_fused_infer_attention_score.default, *tensors, scale=call.scale, inner_precise=0, **common
    )
    if results is not None:
        return site.item(results, 0)
    if common["num_key_value_heads"] == common["num_heads"]:
        common["num_key_value_heads"] = 0  # as many as there are heads; the inference chip takes no other value
    return site.call(_npu.npu_prompt_flash_attention.default, *tensors, scale_value=call.scale, **common)


def _masking(site: Site, call: AttentionCall) -> tuple[int, fx.Node | None, str]:
    """sparse_mode, the mask that it reads, and why there is none."""
    for what, there in (
        ("soft cap", call.softcap),
        ("ALiBi", call.alibi_slopes),
        ("chunks", call.chunk),
        ("sinks in this layout", call.sinks),
    ):
        if there:
            return _FREE, None, f"it knows no {what}"
    if call.attn_mask is None:
        if call.sliding_window and not call.is_causal:
            return _FREE, None, "a window that looks ahead"
        if not call.is_causal:
            return _FREE, None, ""
        if call.sliding_window and str(shape(call.query)[2]) != str(shape(call.key)[2]):
            return _FREE, None, "its window counts from the top left, the kernel's from the bottom right"
        return (_BAND if call.sliding_window else _CAUSAL), causal_mask(site.traced, call.query), ""
    if call.is_causal or call.sliding_window:
        return _FREE, None, "a mask beside a causal one"
    mask = call.attn_mask
    if value(mask).dtype is not torch.bool:
        return _FREE, None, f"its mask is {value(mask).dtype}: numbers that are added, not a choice"
    sizes = shape(mask)
    expected = [shape(call.query)[0], 1, shape(call.query)[2], shape(call.key)[2]]
    if len(sizes) != 4 or str(sizes[1]) != "1":
        return _FREE, None, f"its mask has shape {tuple(sizes)}; the kernel takes one for all heads"
    if str(sizes[0]) not in ("1", str(expected[0])) or [str(s) for s in sizes[2:]] != [str(s) for s in expected[2:]]:
        return _FREE, None, f"its mask has shape {tuple(sizes)} and would have to be repeated"
    # True means seen there, masked out here.
    return _GIVEN, site.dense(site.aten(_aten.logical_not.default, mask)), ""
