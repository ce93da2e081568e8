"""`npu::npu_weight_quant_batchmatmul`: a product with a matrix of 8 or 4 bits whose inputs keep 16.

Source: op-plugin, doc `torch_npu-npu_weight_quant_batchmatmul.md`.
"""

from __future__ import annotations

import torch

from .int4 import PER_INT32, unpack_int4
from .numerics import widened
from .registration import Operator

MAX_WEIGHT_DIM = 65535
"""Of K and N."""
GROUP_MULTIPLE = 32
"""Of the inputs that share a scale; at least so many, and fewer than all."""


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
        bias: ``[N]``, fp32 beside bf16, else of the dtype of ``x``.
        antiquant_group_size: inputs that share a scale, a multiple of 32 below K; 0: all.
        inner_precise: 0.

    Returns:
        ``[M, N]`` in the dtype of ``x``.

    Raises:
        ValueError: shapes, dtypes or groups that do not fit.
        NotImplementedError: a quantised result, scales as int64, other weight dtypes.
    """
    if weight.dtype not in (torch.int8, torch.int32) or antiquant_scale.dtype is torch.int64:
        raise NotImplementedError(
            f"weight is {weight.dtype} and antiquant_scale {antiquant_scale.dtype}; the CPU kernel takes int8, or "
            "int32 of 4 bits, with float scales"
        )
    if weight.dtype is torch.int32 and not weight.is_contiguous():
        raise ValueError("weight is int32 and not contiguous; pack the last dim of [K, N]")
    numbers = unpack_int4(weight) if weight.dtype is torch.int32 else weight
    if x.dim() != 2 or numbers.dim() != 2 or x.shape[1] != numbers.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(numbers.shape)} must be [M, K] and [K, N]")
    inputs, outputs = numbers.shape
    if max(inputs, outputs) > MAX_WEIGHT_DIM:
        raise ValueError(f"weight is {tuple(numbers.shape)}; K and N must be at most {MAX_WEIGHT_DIM}")
    group = antiquant_group_size
    if group and (group % GROUP_MULTIPLE or not GROUP_MULTIPLE <= group < inputs):
        raise ValueError(
            f"antiquant_group_size={group} is no multiple of {GROUP_MULTIPLE} from {GROUP_MULTIPLE} to {inputs - 1}"
        )
    shapes = [(-(-inputs // group), outputs)] if group else [(outputs,), (1, outputs), (1,)]
    for name, given in (("antiquant_scale", antiquant_scale), ("antiquant_offset", antiquant_offset)):
        if given is not None and (given.dtype is not x.dtype or tuple(given.shape) not in shapes):
            raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}; {x.dtype} {shapes[0]} is needed")
    if antiquant_offset is not None and antiquant_offset.shape != antiquant_scale.shape:
        raise ValueError("antiquant_scale and antiquant_offset have different shapes")
    wanted = torch.float32 if x.dtype is torch.bfloat16 else x.dtype
    if bias is not None and (bias.dtype is not wanted or bias.shape not in ((outputs,), (1, outputs))):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}; {wanted} [{outputs}] is needed")
    wide = widened(numbers if x.dtype is not torch.float64 else numbers.double())
    scales = _of_inputs(antiquant_scale, group, inputs).to(wide.dtype)
    if antiquant_offset is not None:
        wide = wide + _of_inputs(antiquant_offset, group, inputs).to(wide.dtype)
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


OPERATORS = (Operator("npu_weight_quant_batchmatmul", npu_weight_quant_batchmatmul, _weight_quant_fake),)
