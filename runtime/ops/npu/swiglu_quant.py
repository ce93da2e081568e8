"""`npu::npu_dequant_swiglu_quant`: a gated activation and the rounding of its result in one.

Source: op-plugin, doc `torch_npu-npu_dequant_swiglu_quant.md`, golden test `test_npu_dequant_swiglu_quant`.
"""

from __future__ import annotations

import torch

from .quantize import rows_to_int8
from .registration import Operator

aten = torch.ops.aten

_UNDEFINED = 77


def npu_dequant_swiglu_quant(
    x: torch.Tensor,
    weight_scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    group_index: torch.Tensor | None,
    activate_left: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu(a) · b`` of the halves of ``x``, rounded to int8 with a scale per row.

    Args:
        x: ``[T, 2 H]``: fp16, bf16 (fp32 to compare); or int32, sums that the two scales turn into numbers.
        weight_scale: fp32 ``[G, 2 H]``, with int32.
        activation_scale: fp32 ``[T, 1]``, with int32.
        group_index: int64 ``[G]``, the rows of each group. Rows behind those of all groups are undefined on a
            device; here their scale is NaN.
        activate_left: SiLU goes over the left half, as in npu_swiglu. By default it goes over the right one.
        quant_mode: 1, a scale for each row (``max / 127``).
        swiglu_mode: 0.

    Returns:
        int8 ``[T, H]`` and fp32 ``[T]``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: static scales, smoothing, biases, the clipped forms.
    """
    rows = len(x)
    counts = [rows] if group_index is None else _counts(group_index, rows)
    numbers = x.float()
    if x.dtype is torch.int32:
        assert weight_scale is not None and activation_scale is not None
        of_row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        used = numbers[: len(of_row)] * weight_scale.float()[of_row] * activation_scale[: len(of_row)]
        numbers = torch.cat([used, numbers[len(of_row) :]])
    left, right = numbers.chunk(2, -1)
    result, scale = rows_to_int8(aten.silu(left) * right if activate_left else aten.silu(right) * left)
    result[sum(counts) :], scale[sum(counts) :] = _UNDEFINED, torch.nan
    return result, scale


def _counts(group_index: torch.Tensor, rows: int) -> list[int]:
    counts: list[int] = group_index.tolist()
    if min(counts, default=0) < 0 or sum(counts) > rows:
        raise ValueError(f"group_index is {counts}; it counts the rows of each group, {rows} at most in all")
    return counts


def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    )


OPERATORS = (
    Operator(
        "npu_dequant_swiglu_quant",
        npu_dequant_swiglu_quant,
        _fake,
        takes={"quant_mode": (1,)},
        ignores=["clamp_limit", "glu_alpha", "glu_bias"],
    ),
)
