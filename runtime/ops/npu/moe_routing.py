"""`npu::` routing of tokens to experts: npu_moe_init_routing_v2, npu_moe_compute_expert_tokens and the way back.

Source: op-plugin, docs `torch_npu-npu_moe_init_routing_v2.md` and `…-npu_moe_finalize_routing.md`, golden tests
`test_npu_moe_init_routing_v2`, `test_npu_moe_finalize_routing_v2`, `test_npu_moe_token_permute_and_unpermute` and
`test_npu_moe_compute_tokens`.

Letters: T tokens, K experts per token, E experts, H hidden size. A token's K choices are the rows ``token · K + k``
of the expanded input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .numerics import widened
from .quantize import rows_to_int8
from .registration import Operator


def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    scale: torch.Tensor | None,
    active_num: int,
    expert_num: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: Sequence[int],
    row_idx_type: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts the tokens' choices by expert (stable) and copies each token to the rows of its experts.

    Args:
        x: ``[T, H]``.
        expert_idx: int32 ``[T, K]``.
        scale: fp32 ``[T]``, moved along with the rows; None with ``quant_mode`` 1.
        expert_num: E.
        expert_tokens_num_type: 0: where each expert's rows end, 1: how many there are, 2: pairs (expert, rows) of the
            experts that have any, ``[E, 2]`` filled with 0.
        expert_tokens_num_flag: whether these are returned; else a scalar without meaning is.
        quant_mode: -1, or 1: rows are rounded to int8, with a scale for each (``max / 127``).
        active_expert_range: ``[first, end)`` of the experts that are computed here; () for all.
        row_idx_type: 0: row ``i`` of the expanded choices lies at ``expanded_row_idx[i]`` (-1: its expert is not
            active), the map that npu_moe_finalize_routing takes with drop_pad_mode 2. 1: row ``i`` of the result is
            choice ``expanded_row_idx[i]``.

    Returns:
        ``expanded_x [T·K, H]`` (0 behind the active rows; undefined on a device), ``expanded_row_idx [T·K]`` int32,
        the counts int64, and ``expanded_scale [T·K]`` fp32 (0 without ``scale`` and ``quant_mode`` 1; NaN behind the
        active rows with that).

    Raises:
        ValueError: shapes, dtypes or ranges that do not fit.
        NotImplementedError: drop_pad_mode 1, other quantizations, fewer active rows than there are.
    """
    if (quant_mode == 1 and scale is not None) or 0 < active_num < expert_idx.numel():
        raise NotImplementedError(
            "the CPU kernel of npu::npu_moe_init_routing_v2 does not implement scale with quant_mode 1, nor an "
            f"active_num below {expert_idx.numel()}; leave them at their defaults"
        )
    first, end = active_expert_range if len(active_expert_range) else (0, expert_num)
    choices = expert_idx.flatten().long()
    if not 0 <= first < end <= expert_num or (
        choices.numel() and not 0 <= choices.min() <= choices.max() < expert_num
    ):
        raise ValueError(
            f"active_expert_range is {[first, end]} and expert_idx lies in "
            f"[{int(choices.min())}, {int(choices.max())}]; there are {expert_num} experts"
        )
    # Experts before the range go behind all others, so that the active rows come first.
    order = torch.where(choices < first, expert_num, choices).argsort(stable=True)
    counts = torch.bincount(choices, minlength=expert_num)[first:end]
    active = int(counts.sum())
    sources = order[:active] // expert_idx.shape[1]
    of_rows = scale
    if quant_mode == 1:
        x, of_rows = rows_to_int8(x.float())
    expanded = x.new_zeros((len(choices), x.shape[1]))
    expanded[:active] = x[sources]
    expanded_scale = torch.full((len(choices),), torch.nan if quant_mode == 1 else 0.0)
    if of_rows is not None:
        expanded_scale[:active] = of_rows[sources]
    if row_idx_type == 1:
        rows = order.int()
    else:
        rows = torch.full((len(choices),), -1, dtype=torch.int32)
        rows[order[:active]] = torch.arange(active, dtype=torch.int32)
    kind = expert_tokens_num_type if expert_tokens_num_flag else None
    return expanded, rows, _tokens_per_expert(counts, first, expert_num, kind), expanded_scale


def _tokens_per_expert(counts: torch.Tensor, first: int, expert_num: int, kind: int | None) -> torch.Tensor:
    if kind is None:
        return torch.zeros((), dtype=torch.int64)
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts.contiguous().clone()
    pairs = torch.zeros(expert_num, 2, dtype=torch.int64)
    busy = counts.nonzero().flatten()
    pairs[: len(busy)] = torch.stack([busy + first, counts[busy]], 1)
    return pairs


def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None,
    k: int | None,
) -> torch.Tensor:
    """``out[i] = skip1[i] + skip2[i] + Σ_k scales[i, k] · (rows[map(i, k)] + bias[expert(i, k)])``.

    Args:
        expanded_permuted_rows: ``[T·K, H]``, or ``[E, C, H]`` with ``drop_pad_mode`` 1 and 3.
        skip1, skip2: ``[T, H]``; ``skip2`` only together with ``skip1``.
        bias: ``[E, H]``, with ``export_for_source_row``.
        scales: ``[T, K]``; None: 1.
        expanded_src_to_dst_row: int32 ``[T·K]``, ``map(i, k)`` at ``k · T + i`` with ``drop_pad_mode`` 0 and 1, at
            ``i · K + k`` with 2 and 3. -1, a dropped row that counts as 0, only with 1 and 3.
        export_for_source_row: int32 ``[T, K]``, the experts (the schema's spelling).
        k: K, where there are no ``scales`` to tell it.

    Returns:
        ``[T, H]`` in the dtype of the rows, summed in fp32.

    Raises:
        ValueError: arguments that do not fit.
    """
    rows = expanded_permuted_rows
    padded = drop_pad_mode in (1, 3)
    places = expanded_src_to_dst_row
    choices = scales.shape[1] if scales is not None else int(k or 1)
    tokens = len(scales) if scales is not None else len(places) // choices
    if rows.dim() != (3 if padded else 2) or places.shape != (tokens * choices,) or places.dtype is not torch.int32:
        raise ValueError(
            f"expanded_permuted_rows has shape {tuple(rows.shape)}, expanded_src_to_dst_row {tuple(places.shape)} "
            f"and dtype {places.dtype}; with drop_pad_mode {drop_pad_mode} and {choices} experts a token they must "
            f"be {'[E, C, H]' if padded else '[T*K, H]'} and int32 [T*K]"
        )
    flat = widened(rows.reshape(-1, rows.shape[-1]))
    places = places.long()
    order = places.reshape(tokens, choices) if drop_pad_mode in (2, 3) else places.reshape(choices, tokens).t()
    if order.numel() and not (-1 if padded else 0) <= int(order.min()) <= int(order.max()) < len(flat):
        raise ValueError(
            f"expanded_src_to_dst_row lies in [{int(order.min())}, {int(order.max())}]; with drop_pad_mode "
            f"{drop_pad_mode} and {len(flat)} rows it must lie in [{-1 if padded else 0}, {len(flat) - 1}]"
        )
    parts = flat[order.clamp(min=0)].masked_fill((order < 0).unsqueeze(-1), 0)
    if bias is not None and export_for_source_row is not None:
        parts = parts + widened(bias)[export_for_source_row.long()]
    if scales is not None:
        parts = parts * widened(scales).unsqueeze(-1)
    total = parts.sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            total = total + widened(skip)
    return total.to(rows.dtype)


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, probs: torch.Tensor | None
) -> torch.Tensor:
    """``out[i] = Σ_k probs[i, k] · permuted_tokens[sorted_indices[i · K + k]]``.

    Args:
        permuted_tokens: ``[T·K, H]``.
        sorted_indices: ``[T·K]`` int32, where each choice lies: what npu_moe_init_routing_v2 returns with
            ``row_idx_type`` 0, and npu_moe_token_permute as its second result.
        probs: ``[T, K]``, K at most 512; None: K is 1, and every row counts as it is.

    Returns:
        ``[T, H]`` in the dtype of the rows, summed in fp32.

    Raises:
        ValueError: arguments that do not fit.
        NotImplementedError: ``padded_mode``, and ``restore_shape``, which only that mode reads.
    """
    rows, places = permuted_tokens, sorted_indices
    choices = 1 if probs is None else probs.shape[1]
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < len(rows):
        raise ValueError(
            f"sorted_indices lies in [{int(places.min())}, {int(places.max())}]; there are {len(rows)} rows"
        )
    parts = widened(rows)[places.long()].unflatten(0, (-1, choices))
    if probs is not None:
        parts = parts * widened(probs).unsqueeze(-1)
    return parts.sum(1).to(rows.dtype)


def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: torch.Tensor, num_expert: int) -> torch.Tensor:
    """Ends of each expert's rows in the ascending list of the rows' experts; int32 ``[num_expert]``."""
    experts = torch.arange(num_expert, dtype=sorted_expert_for_source_row.dtype)
    return torch.searchsorted(sorted_expert_for_source_row.contiguous(), experts, right=True).int()


def _init_routing_fake(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    active_num: int,
    expert_num: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    choices = expert_idx.shape[0] * expert_idx.shape[1]
    rows = choices if active_num <= 0 else min(active_num, choices)
    counts: list[int] = []
    if expert_tokens_num_flag and expert_tokens_num_type == 2:
        counts = [expert_num, 2]
    elif expert_tokens_num_flag:
        counts = [active_expert_range[1] - active_expert_range[0] if len(active_expert_range) else expert_num]
    return (
        x.new_empty((rows, x.shape[1]), dtype=torch.int8 if quant_mode == 1 else x.dtype),
        x.new_empty((choices,), dtype=torch.int32),
        x.new_empty(counts, dtype=torch.int64),
        x.new_empty((rows,), dtype=torch.float32),
    )


def _finalize_fake(
    expanded_permuted_rows: torch.Tensor,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    k: int | None,
) -> torch.Tensor:
    tokens = scales.shape[0] if scales is not None else expanded_src_to_dst_row.shape[0] // (k or 1)
    return expanded_permuted_rows.new_empty((tokens, expanded_permuted_rows.shape[-1]))


def _unpermute_fake(permuted_tokens: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
    tokens = permuted_tokens.shape[0] if probs is None else probs.shape[0]
    return permuted_tokens.new_empty((tokens, permuted_tokens.shape[1]))


def _expert_tokens_fake(sorted_expert_for_source_row: torch.Tensor, num_expert: int) -> torch.Tensor:
    return sorted_expert_for_source_row.new_empty((num_expert,), dtype=torch.int32)


OPERATORS = (
    Operator(
        "npu_moe_init_routing_v2",
        npu_moe_init_routing_v2,
        _init_routing_fake,
        takes={"quant_mode": (-1, 1)},
        ignores=["expert_capacity"],
    ),
    Operator("npu_moe_finalize_routing", npu_moe_finalize_routing, _finalize_fake),
    Operator("npu_moe_token_unpermute", npu_moe_token_unpermute, _unpermute_fake),
    Operator("npu_moe_compute_expert_tokens", npu_moe_compute_expert_tokens, _expert_tokens_fake),
)
