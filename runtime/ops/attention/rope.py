"""`pagoda::rope`: rotary position embedding of queries and keys, in the layouts that models use."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from ..native import FLOAT_CODES, kernel_function
from ..registration import Facts, register_operator

aten = torch.ops.aten

_SCHEMA = "rope(Tensor[] inputs, Tensor cos, Tensor sin, str mode, int start, bool round_products) -> Tensor[]"
# The numbers are the kernel's.
_MODES = {"half": 0, "interleaved": 1, "interleaved_to_half": 2}


def rope_reference(
    inputs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    mode: str,
    start: int,
    round_products: bool,
) -> list[torch.Tensor]:
    """Rotate the dims ``start .. start + R`` of every head by its token's angles; copy the others (Su et al. 2021).

    ``x * cos + turned(x) * sin``, where ``turned`` of the R dims is, by mode:

    - ``half``: ``cat(-x[R/2:], x[:R/2])``, transformers' ``rotate_half``;
    - ``interleaved``: ``-x1, x0, -x3, x2, …`` (GPT-J);
    - ``interleaved_to_half``: ``x`` becomes ``cat(x[0::2], x[1::2])``, then as ``half`` (DeepSeek).

    Args:
        inputs: ``[B, H_i, T, D_i]`` each, fp32, bf16 or fp16, all of one dtype (fp64 runs here). Any strides.
        cos: ``[B or 1, T, R]``, R even, in the dtype of the inputs or fp32. Any strides. All R entries are read, in
            every mode.
        sin: the same.
        mode: one of the above.
        start: first rotated dim.
        round_products: True: in half precision both products are rounded, then their sum (transformers' Llama).
            False: everything is in fp32 and rounded once.

    Returns:
        For each input ``[B, H_i, T, D_i]`` in its dtype, stored as ``[B, T, H_i, D_i]``.

    Raises:
        ValueError: an unknown mode, an odd R, dims beyond a head's end, shapes or dtypes that do not fit.
    """
    _check(inputs, cos, sin, mode, start)
    results = []
    end = start + cos.shape[-1]
    for x in inputs:
        stored = x.transpose(1, 2)
        rotated = _rotated(stored[..., start:end], cos[:, :, None], sin[:, :, None], mode, round_products)
        before, behind = stored[..., :start], stored[..., end:]
        parts = [part for part in (before, rotated, behind) if part.shape[-1]]
        whole = aten.cat(parts, -1) if len(parts) > 1 else next(iter(parts), rotated)
        results.append(whole.contiguous().transpose(1, 2))
    return results


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str, round_products: bool) -> torch.Tensor:
    dtype = x.dtype
    if mode == "interleaved_to_half":
        x = aten.cat((x[..., 0::2], x[..., 1::2]), -1)
    if mode == "interleaved":
        turned = aten.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    else:
        half = x.shape[-1] // 2
        turned = aten.cat((-x[..., half:], x[..., :half]), -1)
    if round_products:
        return (x * cos).to(dtype) + (turned * sin).to(dtype)
    if dtype is not torch.float64:
        x, turned, cos, sin = x.float(), turned.float(), cos.float(), sin.float()
    return (x * cos + turned * sin).to(dtype)


def _check(
    inputs: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, mode: str, start: int
) -> tuple[int, int, int]:
    """Raise ``ValueError`` for what the operator does not take; the shape of the tables."""
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(_MODES)}")
    table_shape, table_dtype = cos.shape, cos.dtype
    if len(table_shape) != 3 or sin.shape != table_shape or sin.dtype is not table_dtype:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)} and dtype {cos.dtype}, sin {tuple(sin.shape)} and {sin.dtype}; "
            "make both [B or 1, T, R] in one dtype"
        )
    table_batch, tokens, rotary = table_shape
    if rotary % 2:
        raise ValueError(f"cos and sin have {rotary} entries per token; rotary dims come in pairs, so R must be even")
    batch = dtype = None
    for i, x in enumerate(inputs):
        shape = x.shape
        if len(shape) != 4 or shape[2] != tokens or (table_batch != 1 and shape[0] != table_batch):
            raise ValueError(
                f"inputs[{i}] has shape {tuple(shape)}, cos and sin {tuple(table_shape)}; "
                "make them [B, H, T, D] and [B or 1, T, R]"
            )
        if start < 0 or start + rotary > shape[3]:
            raise ValueError(
                f"start is {start} and cos has {rotary} entries per token, but the heads of inputs[{i}] have "
                f"{shape[3]} dims; 0 <= start and start + R <= D must hold"
            )
        if dtype is None:
            batch, dtype = shape[0], x.dtype
            if table_dtype is not dtype and table_dtype is not torch.float32:
                raise ValueError(
                    f"cos and sin have dtype {table_dtype}, the inputs {dtype}; convert them to it or torch.float32"
                )
        elif x.dtype is not dtype or shape[0] != batch:
            raise ValueError(
                f"inputs[{i}] has batch {shape[0]} and dtype {x.dtype}, inputs[0] {batch} and {dtype}; "
                "batch and dtype must agree"
            )
    return table_batch, tokens, rotary


def _fake(inputs: Sequence[torch.Tensor], *_: object) -> list[torch.Tensor]:
    results = []
    for x in inputs:
        batch, heads, tokens, dim = x.shape
        results.append(x.new_empty((batch, tokens, heads, dim)).transpose(1, 2))
    return results


def rope_cpu(
    inputs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    mode: str,
    start: int,
    round_products: bool,
) -> list[torch.Tensor]:
    """:func:`rope_reference` by the C++ kernel, for CPU tensors; what it cannot take goes to the reference."""
    table_batch, tokens, rotary = _check(inputs, cos, sin, mode, start)
    kernel = kernel_function("pagoda_rope")
    code = FLOAT_CODES.get(inputs[0].dtype) if inputs else None
    if kernel is None or code is None:
        return rope_reference(inputs, cos, sin, mode, start, round_products)
    cos_batch, cos_token, cos_step = cos.stride()
    sin_batch, sin_token, sin_step = sin.stride()
    if table_batch == 1:  # for the whole batch
        cos_batch = sin_batch = 0
    fields = [
        *(cos.data_ptr(), cos_batch, cos_token, 0, cos_step),
        *(sin.data_ptr(), sin_batch, sin_token, 0, sin_step),
        code,
        FLOAT_CODES[cos.dtype],
        inputs[0].shape[0],
        tokens,
        rotary,
        start,
        _MODES[mode],
        round_products,
        torch.get_num_threads(),
        len(inputs),
    ]
    results = []
    for x in inputs:
        batch, heads, _, dim = x.shape
        row = heads * dim
        if tokens and row:
            result = x.new_empty_strided((batch, heads, tokens, dim), (tokens * row, dim, row, 1))
        else:  # empty: strides count an absent dim as one
            result = x.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
        results.append(result)
        fields += (x.data_ptr(), result.data_ptr(), heads, dim, *x.stride())
    kernel(_arguments(len(inputs)).pack(*fields))
    return results


@functools.cache
def _arguments(inputs: int) -> struct.Struct:
    """Field for field the struct RopeArguments of csrc/rope.cpp, and RopeInput for each input."""
    return struct.Struct(f"={20 + 8 * inputs}q")


rope = register_operator(
    _SCHEMA,
    Facts(over="all", invariant=True, kind="rope", spelled_out=True),
    fake=_fake,
    reference=rope_reference,
    cpu=rope_cpu,
)
