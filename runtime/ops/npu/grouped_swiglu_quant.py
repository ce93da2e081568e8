"""`npu::npu_grouped_matmul_swiglu_quant_v2`: each expert's product, its gated activation and the rounding in one.

Source: op-plugin, doc `torch_npu-npu_grouped_matmul_swiglu_quant_v2.md`; CANN, `aclnnGroupedMatmulSwigluQuantV2.md`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .grouped_matmul import group_ends
from .grouped_quant_matmul import RoundedMatrices, multiply_int8
from .quant_matmul import INT4_GROUP
from .quantize import rows_to_int8
from .registration import Operator

aten = torch.ops.aten

MAX_GATED_OUTPUTS = 10240
"""Of N, gate and up together."""
MAX_GATED_INPUTS, MAX_GATED_INT4_INPUTS = 65535, 19999
"""Of K, beside matrices of 8 and of 4 bits."""
GATED_TILE = (16, 32)
"""What divides K and N of matrices of int8, which the operator reads in FRACTAL_NZ."""
_SCALES = (torch.float32, torch.float16, torch.bfloat16)


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
        group_list: int64 ``[E]``: where each group ends (``group_list_type`` 0), or its rows (1). The groups fill M.
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
    if len(weight) != 1 or len(weight_scale) != 1:
        raise ValueError(f"weight holds {len(weight)} tensors and weight_scale {len(weight_scale)}; one of each")
    (matrix,), (scales,) = weight, weight_scale
    if x.dtype is not torch.int8 or matrix.dtype not in (torch.int8, torch.int32):
        raise NotImplementedError(
            f"x is {x.dtype} and weight {matrix.dtype}; the CPU kernel takes int8 by 8 or 4 bits"
        )
    if x.dim() != 2 or matrix.dim() != 3 or matrix.shape[1] != x.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(matrix.shape)}; [M, K], [E, K, N]")
    matrices = RoundedMatrices(matrix, group_ends(group_list, group_list_type, len(matrix), len(x)))
    experts, inputs, outputs = matrices.sizes
    if outputs % 2 or outputs > MAX_GATED_OUTPUTS:
        raise ValueError(f"weight has {outputs} outputs; an even number up to {MAX_GATED_OUTPUTS}")
    if (weight_assist_matrix is not None) is not matrices.is_int4:
        raise ValueError("weight_assist_matrix is for matrices of 4 bits, and they need it")
    in_groups = dequant_mode == 1
    if in_groups and not matrices.is_int4:
        raise ValueError("dequant_mode is 1; it is for matrices of 4 bits")
    wanted = (torch.int64,) if matrices.is_int4 else _SCALES
    sizes = (experts, *([inputs // INT4_GROUP] if in_groups else []), outputs)
    if scales.dtype not in wanted or scales.shape != sizes:
        raise ValueError(
            f"weight_scale is {scales.dtype} {tuple(scales.shape)}; {' or '.join(map(str, wanted))} {sizes} is needed"
        )
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
    ),
)
