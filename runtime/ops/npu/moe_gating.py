"""`npu::` choice of experts: npu_moe_gating_top_k, npu_moe_gating_top_k_softmax and its second version.

Source: op-plugin, docs `torch_npu-npu_moe_gating_top_k.md` and `…-npu_moe_gating_top_k_softmax.md`; of the second
version, which op-plugin has no document of, CANN's `aclnnMoeGatingTopKSoftmaxV2.md` (ops-transformer) and op-plugin's
golden test `test_npu_moe_gating_top_k_softmax_v2`.
"""

from __future__ import annotations

import torch

from .registration import Operator


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, groups and picks experts (DeepSeek-V3).

    ``p = softmax(x)`` (``norm_type`` 0) or ``σ(x)`` (1); experts are chosen by ``s = p + bias`` among the ``k_group``
    best of ``group_count`` groups, a group being worth its best ``s`` (``group_select_mode`` 0) or the sum of its two
    best (1); equal scores go to the lower expert. ``y = p[chosen]``, with ``norm_type`` 1 divided by
    ``Σ y + eps``, then times ``routed_scaling_factor``. The softmax case is not normalized again.

    Args:
        x: ``[T, E]``.
        bias: ``[E]``, the dtype of ``x``.

    Returns:
        ``y [T, k]`` in the dtype of ``x``, the experts ``[T, k]`` int32, and ``p [T, E]`` fp32 (without ``out_flag``
        undefined on a device, NaN here).

    Raises:
        ValueError: arguments that the document forbids.
        NotImplementedError: hash routing.
    """
    logits = x.float()
    scores = logits.softmax(-1) if norm_type == 0 else logits.sigmoid()
    ranked = scores if bias is None else scores + bias.float()
    if group_count > 1:
        grouped = ranked.unflatten(1, (group_count, -1))
        worth = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, -1).values.sum(-1)
        kept = _best(worth, k_group)
        dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(1, kept, False)
        ranked = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = _best(ranked, k)
    weights = scores.gather(1, chosen)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, chosen.int(), scores if out_flag else torch.full_like(scores, float("nan"))


def npu_moe_gating_top_k_softmax(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``k`` largest of ``softmax(x)``, not normalized again; equal ones go to the lower expert.

    Experts are ranked by the fp32 softmax. Of fp16 logits a device ranks it rounded to fp16 (so that near-equal
    experts tie, and the lower one wins) where its kernel for many experts runs: with ``k`` above 8, or with 8 experts
    and more unless there are at most 1024 and a multiple of 8 (ops-transformer, ``moe_gating_top_k_softmax``, its
    tiling). Lowering gives the operator fp32 logits.

    Args:
        x: ``[T, E]`` or ``[B, S, E]``.

    Returns:
        Weights in the dtype of ``x``, experts int32, and ``row_idx[i, j] = j · T + i`` int32, all ``[..., k]``.

    Raises:
        ValueError: ``x`` or ``k`` out of range.
        NotImplementedError: finished rows.
    """
    scores = x.float().softmax(-1)
    experts = x.shape[-1]
    if x.dtype is torch.float16 and experts >= 8 and (k > 8 or experts > 1024 or experts % 8):
        scores = scores.half().float()
    chosen = _best(scores, k)
    tokens = x.shape[:-1].numel()
    rows = torch.arange(tokens * k, dtype=torch.int32).reshape(k, tokens).t().reshape(*x.shape[:-1], k)
    return scores.gather(-1, chosen).to(x.dtype), chosen.int(), rows.contiguous()


def npu_moe_gating_top_k_softmax_v2(
    x: torch.Tensor, k: int, renorm: int | None, output_softmax: bool | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With ``renorm`` 1 the softmax of the ``k`` largest of ``x``, else the ``k`` largest of its softmax.

    Args:
        x: ``[T, E]`` or ``[B, S, E]``.
        output_softmax: whether the softmax of all is returned, without ``renorm``.

    Returns:
        Weights in the dtype of ``x``, experts int32, both ``[..., k]``, and the softmax fp32, or ``[0]``.

    Raises:
        ValueError: ``x``, ``k`` or ``renorm`` out of range.
        NotImplementedError: finished rows.
    """
    scores = x.float() if renorm else x.float().softmax(-1)
    chosen = _best(scores, k)
    weights = scores.gather(-1, chosen)
    if renorm:
        weights = weights.softmax(-1)
    whole = scores if output_softmax and not renorm else scores.new_empty(0)
    return weights.to(x.dtype), chosen.int(), whole


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    # torch.topk does not say which of equal values it takes; the operators take the first.
    return values.sort(stable=True, dim=-1, descending=True).indices[..., :count]


def _gating_fake(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (x.shape[0], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), x.new_empty(x.shape, dtype=torch.float32)


def _gating_softmax_fake(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.int32)


def _gating_softmax_v2_fake(
    x: torch.Tensor, k: int, renorm: int | None, output_softmax: bool | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], k)
    whole = x.shape if output_softmax and not renorm else (0,)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), x.new_empty(whole, dtype=torch.float32)


OPERATORS = (
    Operator("npu_moe_gating_top_k", npu_moe_gating_top_k, _gating_fake),
    Operator("npu_moe_gating_top_k_softmax", npu_moe_gating_top_k_softmax, _gating_softmax_fake),
    Operator("npu_moe_gating_top_k_softmax_v2", npu_moe_gating_top_k_softmax_v2, _gating_softmax_v2_fake),
)
