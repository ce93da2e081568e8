"""`npu::npu_grouped_matmul_swiglu_quant_v2`: each expert's product, its gated activation and the rounding in one.

Source: op-plugin, doc `torch_npu-npu_grouped_matmul_swiglu_quant_v2.md`; CANN, `aclnnGroupedMatmulSwigluQuantV2.md`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .grouped_matmul import group_ends
from .grouped_quant_matmul import RoundedMatrices, multiply_int8
from .quantize import rows_to_int8
from .registration import Operator

aten = torch.ops.aten


def npu_grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    weight_assist_matrix: Sequence[torch.Tensor] | None,
    dequant_mode: int | None,
    group_list_type: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu(a) · b`` of the halves of ``(x[rows of group g] @ weight[g]) · weight_scale[g] · x_scale``, rounded to
    int8 with a scale per row. Sums are exact in int32; all else is float32, and only the result is rounded.

    Args:
        x: int8 ``[M, K]``.
        weight: one int8 ``[E, K, N]``, on a device in FRACTAL_NZ, but on 950 in rows; or 4 bits, int32
            ``[E, K, N / 8]`` (see ``int4``). The gates are the left half of N.
        weight_scale: one fp32, fp16 or bf16 ``[E, N]``; of 4 bits int64 that holds the bits of fp32, with
            ``dequant_mode`` 1 ``[E, K / 256, N]``.
        x_scale: fp32 ``[M]``.
        group_list: int64 ``[E]``: where each group ends (``group_list_type`` 0), or its rows (1). Rows behind
            the last group are not computed.
        weight_assist_matrix: of 4 bits, one fp32 ``[E, N]``, the bias of npu_grouped_matmul; else None.
        dequant_mode: 0, a scale for each output; 1, of 4 bits, for each group of 256 of its inputs.
        dequant_dtype: 6, fp32.
        quant_mode: 0, a scale for each row.
        quant_dtype: 1, int8.

    Returns:
        int8 ``[M, N / 2]`` and fp32 ``[M]``, ``max / 127``.

    Raises:
        ValueError: shapes, dtypes or groups that do not fit.
        NotImplementedError: floats of 8 and 4 bits, smoothing, biases.
    """
    (matrix,), (scales,) = weight, weight_scale
    matrices = RoundedMatrices(matrix, group_ends(group_list, group_list_type, len(matrix), len(x)))
    in_groups = dequant_mode == 1
    kept = scales.float() if not matrices.is_int4 else scales if in_groups else scales[:, None]
    numbers = multiply_int8(x, matrices, [kept], [x_scale], weight_assist_matrix, torch.float32)
    gate, up = numbers.chunk(2, -1)
    return rows_to_int8(aten.silu(gate) * up)


def _fake(x: torch.Tensor, weight_scale: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = weight_scale[0].shape[-1]
    return x.new_empty((x.shape[0], outputs // 2), dtype=torch.int8), x.new_empty(x.shape[:1], dtype=torch.float32)


OPERATORS = (
    Operator(
        "npu_grouped_matmul_swiglu_quant_v2",
        npu_grouped_matmul_swiglu_quant_v2,
        _fake,
        takes={"dequant_mode": (0, 1), "group_list_type": (0, 1)},
        ignores=["tuning_config"],
        lacks={name: [torch.float8_e4m3fn, torch.float8_e5m2] for name in ("x", "weight[0]")},
    ),
)
