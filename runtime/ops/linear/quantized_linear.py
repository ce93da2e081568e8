"""`pagoda::quantized_linear`: a linear layer whose weight is rounded to few bits, and often its input, too."""

from __future__ import annotations

import functools
import itertools
import struct

import torch

from ...shown import shown
from ..attention.int8_rows import dequantize_rows, quantize_rows
from ..native import FLOAT_CODES, kernel_function
from ..registration import Facts, register_operator
from .quantized_weight import CODES, PANEL, Quantization, packed_bytes, restored_weight, round_weight, unpack_weight
from .weight_format import InputScale

aten = torch.ops.aten

_SCHEMA = (
    "quantized_linear(Tensor input, Tensor weight, Tensor? bias, int out_features, int bits, int group_size, "
    "int input_bits, bool zeros=False, Tensor? order=None, str code='int', float input_scale=0.0, "
    "int input_offset=0, bool whole_rows=False) -> Tensor"
)
# Field for field the struct QuantizedLinearArguments of csrc/quantized_linear.cpp.
_ARGUMENTS = struct.Struct("=19qdqq")
_LARGEST_IN_16_BITS = 127 * 256  # 256 times a number of 8 bits and another one


def quantized_linear_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    input_bits: int,
    zeros: bool = False,
    order: torch.Tensor | None = None,
    code: str = "int",
    input_scale: float = 0.0,
    input_offset: int = 0,
    whole_rows: bool = False,
) -> torch.Tensor:
    """``input @ weight.T + bias`` with weight and input rounded to integers with scales.

    Products within a group are summed exactly, groups in float32, and the sum is rounded once.

    Args:
        input: ``[..., in]``, fp32, bf16 or fp16.
        weight: ``[out_features, in]``, not rounded yet; or 1-d uint8, what
            :func:`~torch_pagoda.runtime.ops.linear.quantized_weight.quantize_weight` made of it, or ``pack_stored``.
        bias: ``[out_features]`` or None.
        out_features: outputs.
        bits: of a weight, 8 or 4.
        group_size: inputs that share a scale, 16, 32 or a multiple of 64; 0: all.
        input_bits: of the input, with a scale for each group, but at least 64 numbers, of each row: 8
            (``max|x| / 127``) or 16 (``max|x| / 32512``); 0, where weights are floats of 8 bits: it is not rounded.
        zeros: groups have zeros of their own.
        order: int32 ``[in]``: of column k of a packed weight, the input that it is for; None: k.
        code: of a packed weight, ``"int"``, ``"affine"`` where groups have offsets, or for floats ``"e4m3"`` or
            ``"e2m1"``.
        input_scale: static scale of 8-bit inputs (``InputScale``), for weights with one scale per output; 0: computed
            from the inputs.
        input_offset: likewise, their offset.
        whole_rows: inputs of 8 bits have one scale for a row, however many groups there are.

    Returns:
        ``[..., out_features]`` in the dtype of ``input``, contiguous.

    Raises:
        ValueError: bits, group size or the weight's size do not fit.
    """
    scheme = _scheme(bits, group_size, input_bits, zeros, code, input_scale, input_offset, whole_rows)
    inputs = input.shape[-1]
    if weight.dtype is torch.uint8:
        _check_packed(weight, out_features, inputs, scheme, order)
        input = input if order is None else input[..., order.long()]
        whole, scales = unpack_weight(weight, out_features, inputs, scheme)
    else:
        whole, scales = round_weight(weight, scheme)
    rows = input.float()
    if scheme.input_scale is not None:
        whole_inputs = (rows / input_scale + input_offset).round().clamp(-128, 127)
        rows = (whole_inputs - input_offset) * input_scale
    elif input_bits:
        size = max(group_size, PANEL) if group_size and not whole_rows else inputs
        groups = aten.pad(rows, (0, -inputs % size)).unflatten(-1, (-1, size))
        rows = _rounded(groups, input_bits).flatten(-2)[..., :inputs]
    result = aten.linear(rows, restored_weight(whole, scales, scheme))
    result = result if bias is None else result + bias.float()
    return result.to(input.dtype)


def _scheme(
    bits: int,
    group_size: int,
    input_bits: int,
    zeros: bool,
    code: str,
    input_scale: float,
    input_offset: int,
    whole_rows: bool,
) -> Quantization:
    given = InputScale(input_scale, input_offset) if input_scale or input_offset else None
    return Quantization(bits, group_size, input_bits, zeros, code, given, whole_rows)


def _rounded(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers ``[..., N]`` after rounding, with one scale for all N."""
    if bits == 8:
        return dequantize_rows(*quantize_rows(groups), torch.float32)
    scale = groups.abs().amax(-1, keepdim=True) / _LARGEST_IN_16_BITS
    scale = aten.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)  # NaN and infinity stay
    scale = aten.where(scale == torch.inf, torch.nan, scale)
    return aten.where(scale == 0, 0.0, (groups / scale).round() * scale)


def quantized_linear_cpu(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    input_bits: int,
    zeros: bool = False,
    order: torch.Tensor | None = None,
    code: str = "int",
    input_scale: float = 0.0,
    input_offset: int = 0,
    whole_rows: bool = False,
) -> torch.Tensor:
    """:func:`quantized_linear_reference` by the C++ kernel for packed weights, else the reference."""
    scheme = _scheme(bits, group_size, input_bits, zeros, code, input_scale, input_offset, whole_rows)
    if weight.dtype is torch.uint8 and _has_kernel(input):
        _check_packed(weight, out_features, input.shape[-1], scheme, order)
        result = input.new_empty((*input.shape[:-1], out_features))
        rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        _run_kernel(result, rows, weight, bias, out_features, scheme, order)
        return result
    given = (input, weight, bias, out_features, *scheme.arguments(order))
    return quantized_linear_reference(*given)


def quantized_linears_cpu(
    rows: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    starts: torch.Tensor,
    out_features: int,
    scheme: Quantization,
) -> torch.Tensor:
    """:func:`quantized_linear_cpu` of several weights in one call, each over rows of its own.

    Args:
        rows: ``[N, in]``, fp32, bf16 or fp16.
        weights: ``[E, bytes]`` uint8, packed.
        bias: ``[E, out_features]`` or None.
        starts: ``[E + 1]`` int64: weight e is for the rows from ``starts[e]`` up to ``starts[e + 1]``, the first one
            0 and the last one N.
        out_features: outputs of each weight.
        scheme: of all weights.

    Returns:
        ``[N, out_features]`` in the dtype of ``rows``, contiguous.

    Raises:
        ValueError: the weights' size does not fit; ``starts`` has another shape, or does not rise from 0 to N.
    """
    _check_starts(starts, len(weights), len(rows))
    result = rows.new_empty(len(rows), out_features)
    if _has_kernel(rows):
        _check_packed(weights[0], out_features, rows.shape[1], scheme, None)
        if not weights.is_contiguous():
            raise ValueError(f"weights has strides {weights.stride()}; give contiguous ones")
        _run_kernel(result, rows, weights, bias, out_features, scheme, None, starts)
        return result
    bounds: list[int] = starts.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start < end:
            own = None if bias is None else bias[i]
            part = quantized_linear_reference(rows[start:end], weights[i], own, out_features, *scheme.arguments())
            result[start:end] = part
    return result


def _check_starts(starts: torch.Tensor, weights: int, rows: int) -> None:
    bounds: list[int] = starts.tolist()
    if len(bounds) != weights + 1 or bounds[0] != 0 or bounds[-1] != rows or bounds != sorted(bounds):
        raise ValueError(f"starts is {shown(bounds)}; give {weights + 1} numbers that rise from 0 to {rows}")


def _has_kernel(input: torch.Tensor) -> bool:
    known = kernel_function("pagoda_quantized_linear") is not None and input.dtype in FLOAT_CODES
    return known and input.shape[-1] > 0


def _run_kernel(
    result: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    scheme: Quantization,
    order: torch.Tensor | None,
    starts: torch.Tensor | None = None,
) -> None:
    """Fill ``result``; ``starts`` belongs to several weights."""
    kernel = kernel_function("pagoda_quantized_linear")
    assert kernel is not None
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    dtype = FLOAT_CODES[rows.dtype]
    kernel(
        _ARGUMENTS.pack(
            rows.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if order is None else order.data_ptr(),
            result.data_ptr(),
            dtype,
            dtype if bias is None else FLOAT_CODES[bias.dtype],
            rows.shape[0],
            rows.shape[1],
            out_features,
            rows.stride(0),
            scheme.bits,
            scheme.group_size,
            scheme.input_bits,
            int(scheme.zeros or scheme.code == "affine"),
            torch.get_num_threads(),
            CODES.index(scheme.code),
            0 if starts is None else starts.data_ptr(),
            1 if starts is None else len(weight),
            *(scheme.input_scale or (0.0, 0)),
            int(scheme.whole_rows),
        )
    )


def _check_packed(
    weight: torch.Tensor, out_features: int, inputs: int, scheme: Quantization, order: torch.Tensor | None
) -> None:
    expected = _packed_bytes(out_features, inputs, scheme)
    if weight.shape != (expected,) or not weight.is_contiguous():
        raise ValueError(
            f"weight is {tuple(weight.shape)} {weight.dtype}; [{out_features}, {inputs}] at {scheme.bits} bits, "
            f"group_size={scheme.group_size}, has {expected} bytes: give what quantize_weight made of it"
        )
    if order is not None and (order.shape != (inputs,) or order.dtype is not torch.int32 or order.stride(0) != 1):
        raise ValueError(f"order is {tuple(order.shape)} {order.dtype}; give ({inputs},) torch.int32")


@functools.lru_cache(maxsize=1024)
def _packed_bytes(out_features: int, inputs: int, scheme: Quantization) -> int:
    """Asked at every call; a model has few sizes."""
    return packed_bytes(out_features, inputs, scheme)


def _fake(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, *_: object
) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


quantized_linear = register_operator(
    _SCHEMA,
    Facts(over="rows", invariant=True, kind="", spelled_out=False),
    fake=_fake,
    reference=quantized_linear_reference,
    cpu=quantized_linear_cpu,
)
