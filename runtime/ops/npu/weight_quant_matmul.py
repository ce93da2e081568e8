"""`npu::npu_weight_quant_batchmatmul`: a product with a matrix of 8 or 4 bits whose inputs keep 16.

Source: op-plugin, doc `torch_npu-npu_weight_quant_batchmatmul.md`.
"""

from __future__ import annotations

import torch

from .int4 import PER_INT32, unpack_int4
from .numerics import widened
from .registration import Operator


def npu_weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    antiquant_group_size: int,
) -> torch.Tensor:
    """``x @ ((weight + antiquant_offset) · antiquant_scale) + bias``, in fp32, rounded once.

    Args:
        x: ``[M, K]`` fp16 or bf16 (fp32 and fp64 to compare).
        weight: int8 ``[K, N]``, any strides; or int32 ``[K, N / 8]`` of 4 bits (see ``int4``), contiguous.
        antiquant_scale: of the dtype of ``x``; ``[N]``, ``[1, N]`` or ``[1]``, or ``[⌈K / group⌉, N]``.
        antiquant_offset: of the same shape and dtype; added before the scale. None: 0.
        bias: ``[N]``, fp32 for bf16 inputs, else of the dtype of ``x``.
        antiquant_group_size: inputs that share a scale, a multiple of 32 below K; 0: all.
        inner_precise: 0.

    Returns:
        ``[M, N]`` in the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or groups that do not fit.
        NotImplementedError: a quantized result, scales as int64, other weight dtypes.
    """
    numbers = unpack_int4(weight) if weight.dtype is torch.int32 else weight
    group = antiquant_group_size
    wide = widened(numbers if x.dtype is not torch.float64 else numbers.double())
    scales = _of_inputs(antiquant_scale, group, len(numbers)).to(wide.dtype)
    if antiquant_offset is not None:
        wide = wide + _of_inputs(antiquant_offset, group, len(numbers)).to(wide.dtype)
    product = widened(x) @ (wide * scales)
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.to(x.dtype)


def _of_inputs(table: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    """A table of groups with a row for each input."""
    return table.repeat_interleave(group, 0)[:inputs] if group else table.reshape(1, -1)


def _weight_quant_fake(x: torch.Tensor, weight: torch.Tensor, quant_scale: torch.Tensor | None) -> torch.Tensor:
    packed = weight.dtype is torch.int32 and weight.is_contiguous()
    outputs = weight.shape[1] * (PER_INT32 if packed else 1)
    return x.new_empty((x.shape[0], outputs), dtype=x.dtype if quant_scale is None else torch.int8)


OPERATORS = (
    Operator(
        "npu_weight_quant_batchmatmul",
        npu_weight_quant_batchmatmul,
        _weight_quant_fake,
        lacks={"antiquant_scale": [torch.int64]},
    ),
)
