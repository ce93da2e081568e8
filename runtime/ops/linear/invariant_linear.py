"""`pagoda::invariant_linear`: a linear layer whose rows do not depend on their batch mates, bit for bit."""

from __future__ import annotations

import struct

import torch

from ..native import FLOAT_CODES, kernel_function
from ..registration import Facts, register_operator

aten = torch.ops.aten

_SCHEMA = "invariant_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor"
_ARGUMENTS = struct.Struct("=13q")  # InvariantLinearArguments in csrc/invariant_linear.cpp


def invariant_linear_reference(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``input @ weight.T + bias``, summed in float32 and rounded once.

    The kernel sums the products of an output in one order: neither the number of rows nor that of threads, nor where
    a row stands, changes a bit of it. (This reference, in plain torch, promises that of no machine.)

    Args:
        input: ``[..., in]``, fp32, bf16 or fp16.
        weight: ``[out, in]`` in the dtype of ``input``; it is read where it lies, transposed or not.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]`` in the dtype of ``input``, contiguous.
    """
    result = aten.linear(input.float(), weight.float(), None if bias is None else bias.float())
    return result.to(input.dtype)


def invariant_linear_cpu(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`invariant_linear_reference` by the C++ kernel.

    Raises:
        RuntimeError: there are no kernels, or none for the dtype; another product would not keep the promise.
        ValueError: shapes or dtypes do not fit together.
    """
    kernel = kernel_function("pagoda_invariant_linear")
    code = FLOAT_CODES.get(input.dtype)
    if kernel is None or code is None:
        reason = "the C++ kernels" if kernel is None else f"a kernel for {input.dtype}"
        raise RuntimeError(f"pagoda::invariant_linear needs {reason}; compile without batch_invariant")
    outputs, inputs = weight.shape
    if (
        input.shape[-1] != inputs
        or weight.dtype is not input.dtype
        or (bias is not None and bias.shape != (outputs,))
    ):
        raise ValueError(
            f"input {tuple(input.shape)} {input.dtype}, weight {tuple(weight.shape)} {weight.dtype} and bias "
            f"{None if bias is None else tuple(bias.shape)} do not fit; give [..., in], [out, in], [out], one dtype"
        )
    result = input.new_empty((*input.shape[:-1], outputs))
    rows = input if input.dim() == 2 else input.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if 1 not in weight.stride():
        weight = weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    kernel(
        _ARGUMENTS.pack(
            rows.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            result.data_ptr(),
            code,
            code if bias is None else FLOAT_CODES[bias.dtype],
            rows.shape[0],
            inputs,
            outputs,
            rows.stride(0),
            *weight.stride(),
            torch.get_num_threads(),
        )
    )
    return result


def _fake(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


invariant_linear = register_operator(
    _SCHEMA,
    Facts(over="rows", invariant=True, kind="", spelled_out=False),
    fake=_fake,
    reference=invariant_linear_reference,
    cpu=invariant_linear_cpu,
)
