"""`npu::` norms: npu_rms_norm, npu_add_rms_norm(_cast, _dynamic_quant, _quant), gemma's, and npu_add_layer_norm.

Source: op-plugin, docs `torch_npu-npu_rms_norm.md`, `…-npu_add_rms_norm.md` and
`…-npu_add_rms_norm_(dynamic_)quant.md`, golden tests `test_npu_add_rms_norm(_cast, _dynamic_quant, _quant)`,
`test_npu_gemma_rms_norm` and `test_npu_add_layer_norm`. The statistics have the dims of the input, 1 where ``gamma``
has dims.
"""

from __future__ import annotations

import torch

from .numerics import rounded_to_int8, stored_like, widened
from .quantize import rows_to_int8
from .registration import Operator


def rms_normed(wide: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """:func:`npu_rms_norm` of a tensor in the dtype to compute in, over its last dim, not rounded."""
    return _rms_norm(wide, gamma, epsilon)[0] * widened(gamma)


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = input · rstd · gamma`` with ``rstd = 1 / √(mean(input²) + epsilon)`` over the dims of ``gamma``.

    Args:
        input: fp16, bf16, fp32 (fp64).
        gamma: the last dims of ``input``; its dtype, or fp32.

    Returns:
        ``y`` like ``input``, and ``rstd`` in fp32.
    """
    normed, rstd = _rms_norm(widened(input), gamma, epsilon)
    return stored_like(normed * widened(gamma), input), rstd


def npu_gemma_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`npu_rms_norm` with ``1 + gamma`` as scale."""
    normed, rstd = _rms_norm(widened(input), gamma, epsilon)
    return stored_like(normed * (1 + widened(gamma)), input), rstd


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`npu_rms_norm` of ``x = x1 + x2``, which is rounded to its dtype first.

    Args:
        x1, x2: one shape and dtype.
        gamma: the last dims of ``x1``, its dtype.

    Returns:
        ``(y, rstd, x)``: the sum comes last.
    """
    _, normed, rstd, total = _add_rms_norm(x1, x2, gamma, epsilon)
    return normed, rstd, total


def npu_add_rms_norm_cast(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`npu_add_rms_norm` that returns ``(y in fp32, y, rstd, x)``; both ``y`` come from the unrounded value."""
    wide, normed, rstd, total = _add_rms_norm(x1, x2, gamma, epsilon)
    return stored_like(wide, x1, torch.float32), normed, rstd, total


def npu_add_rms_norm_dynamic_quant(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of ``x1 + x2`` in int8 with a scale per row, ``max / 127``; nothing is rounded before.

    Args:
        x1, x2: one shape and dtype.
        gamma: ``[x1.shape[-1]]``, of their dtype.
        output_mask: None or [True, False]: there is one result and no second one.

    Returns:
        ``(y1, y2, x, scale1, scale2)``: int8 like ``x1``, an empty tensor, the sum in the dtype of ``x1``, fp32
        ``x1.shape[:-1]``, and an empty tensor.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: smoothing, a second result, a shift, other dtypes.
    """
    total = widened(x1) + widened(x2)
    normed, _ = _rms_norm(total, gamma, epsilon)
    quantized, scale = rows_to_int8((normed * widened(gamma)).float())
    none = x1.new_empty(0, dtype=torch.int8), x1.new_empty(0, dtype=torch.float32)
    return quantized, none[0], total.to(x1.dtype).contiguous(), scale, none[1]


def npu_add_rms_norm_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of ``x1 + x2`` in int8, ``rint(y / scales1 + zero_points1)`` clamped; nothing is rounded before.

    Args:
        x1, x2: one shape and dtype.
        gamma: the last dims of ``x1``, of its dtype.
        scales1: the shape of ``gamma``; fp32, or bf16 for bf16 inputs.
        zero_points1: likewise; int32 with fp32 scales, bf16 with bf16 ones. None: 0.

    Returns:
        ``(y1, y2, x)``: int8 like ``x1``, a second result that has no meaning without a second scale (0 here), and
        the sum in the dtype of ``x1``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: a second result, a shift, another axis, products with scales, other dtypes.
    """
    total = widened(x1) + widened(x2)
    value = _rms_norm(total, gamma, epsilon)[0] * widened(gamma) / widened(scales1)
    if zero_points1 is not None:
        value = value + widened(zero_points1)
    none = x1.new_zeros(x1.shape, dtype=torch.int8)
    return rounded_to_int8(value).contiguous(), none, total.to(x1.dtype).contiguous()


def npu_add_layer_norm(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float,
    additional_output: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm of ``x = x1 + x2`` over the dims of ``gamma``: ``(x - mean) · rstd · gamma + beta``.

    Args:
        x1, x2: one shape; one dtype, or one of them fp32.
        gamma, beta: the last dims of ``x1``; the dtype of the sum, or fp32.
        additional_output: whether the sum is returned.

    Returns:
        ``(y, mean, rstd, x)``, ``mean`` and ``rstd`` in fp32, the others in the dtype of the sum: fp32 where the
        dtypes differ. Without ``additional_output`` the last one has no meaning; it is NaN here.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    total = stored_like(x1 + x2, x1, dtype)
    wide = widened(total)
    dims = tuple(range(-gamma.dim(), 0))
    mean = wide.mean(dims, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(dims, keepdim=True) + epsilon)
    normed = (wide - mean) * rstd * widened(gamma) + widened(beta)
    if not additional_output:
        total = torch.full_like(total, float("nan"))
    return stored_like(normed, total), mean.float().contiguous(), rstd.float().contiguous(), total


def _rms_norm(wide: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(wide.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)
    return wide * rstd, rstd.float().contiguous()


def _add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = stored_like(x1 + x2, x1)
    normed, rstd = _rms_norm(widened(total), gamma, epsilon)
    normed = normed * widened(gamma)
    return normed, stored_like(normed, x1), rstd, total


def _statistics(input: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    kept = input.dim() - gamma.dim()
    return input.new_empty((*input.shape[:kept], *(1,) * gamma.dim()), dtype=torch.float32)


def _rms_norm_fake(input: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(input), _statistics(input, gamma)


def _add_rms_norm_fake(x1: torch.Tensor, gamma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x1), _statistics(x1, gamma), torch.empty_like(x1)


def _add_rms_norm_cast_fake(
    x1: torch.Tensor, gamma: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.empty_like(x1, dtype=torch.float32)
    return wide, torch.empty_like(x1), _statistics(x1, gamma), torch.empty_like(x1)


def _add_rms_norm_dynamic_quant_fake(
    x1: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    quantized, scale = x1.new_empty(x1.shape, dtype=torch.int8), x1.new_empty(x1.shape[:-1], dtype=torch.float32)
    none = x1.new_empty(0, dtype=torch.int8), x1.new_empty(0, dtype=torch.float32)
    return quantized, none[0], x1.new_empty(x1.shape), scale, none[1]


def _add_rms_norm_quant_fake(x1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second = (x1.new_empty(x1.shape, dtype=torch.int8) for _ in range(2))
    return first, second, x1.new_empty(x1.shape)


def _add_layer_norm_fake(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = torch.empty_like(x1, dtype=torch.promote_types(x1.dtype, x2.dtype))
    return total, _statistics(x1, gamma), _statistics(x1, gamma), torch.empty_like(total)


OPERATORS = (
    Operator("npu_rms_norm", npu_rms_norm, _rms_norm_fake),
    Operator("npu_gemma_rms_norm", npu_gemma_rms_norm, _rms_norm_fake),
    Operator("npu_add_rms_norm", npu_add_rms_norm, _add_rms_norm_fake),
    Operator("npu_add_rms_norm_cast", npu_add_rms_norm_cast, _add_rms_norm_cast_fake),
    Operator(
        "npu_add_rms_norm_dynamic_quant",
        npu_add_rms_norm_dynamic_quant,
        _add_rms_norm_dynamic_quant_fake,
        takes={"output_mask": (None, [True, False])},
    ),
    Operator(
        "npu_add_rms_norm_quant", npu_add_rms_norm_quant, _add_rms_norm_quant_fake, takes={"dst_type": (None, 1)}
    ),
    Operator("npu_add_layer_norm", npu_add_layer_norm, _add_layer_norm_fake),
)
