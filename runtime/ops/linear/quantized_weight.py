"""Matrices of integers or floats of 8 or 4 bits, with a scale per output and group of inputs, as the
CPU's kernel reads them.

The layout (csrc/panels.h): panels of 64 outputs; a panel is its groups; a group is its head, 64 float32 scales and,
where each has a zero of its own, 64 bytes with those, or 64 float32 offsets, then steps of 64 inputs (groups of 32 or
16 share a step, behind their heads); a step holds four tiles ``[16 (input / 4), 16 (output), 4 (input % 4)]`` of
unsigned numbers around ``2^(bits - 1)``, or floats ``[32 (input / 2), 64 (output), 2 (input % 2)]``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...memory import advise_huge_pages
from ..native import FLOAT_CODES, kernel_function
from .stored_weight import StoredWeight, run_stored_kernel
from .weight_format import CODES, E2M1, InputScale, WeightFormat, unpacked_pairs, values_of

aten = torch.ops.aten

PANEL = 64
"""Outputs of a panel, and inputs of a step; groups hold whole steps, or half of one."""

SHARED_STEPS = (32, 16)
"""Sizes of groups that share a step; others hold whole steps."""

LARGEST_INPUTS = 65536
"""More inputs than these might overflow the kernel's sums."""

DEFAULT_GROUP_SIZES = {8: 256, 4: 128}
"""Of weights with so many bits."""

_WIDTHS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "int": ((8, 4), (8, 16)),
    "e4m3": ((8,), (0,)),
    "e2m1": ((4,), (8, 16)),
    "affine": ((8, 4), (8, 16)),
}
"""Bits that weights and inputs may have."""

_TILE = 16
# Field for field the struct QuantizeWeightArguments of csrc/quantized_weight.cpp.
_ARGUMENTS = struct.Struct("=10q")
_CANDIDATES = [8 + i / 10 for i in range(-9, 10)]


@dataclass(frozen=True)
class Quantization:
    """Scheme that a linear layer is rounded by.

    Attributes:
        bits: of a weight, 8 or 4.
        group_size: inputs that share a scale; 0: all.
        input_bits: that the input is rounded to, with a scale for each group, or step where groups share these, of
            each row. Rounded to 16, numbers keep what bf16 tells apart of those that matter in a sum.
        zeros: each group of each output has a zero of its own; else it is ``2^(bits - 1)``.
        code: ``"int"``; ``"affine"`` for integers in groups that share a step and have offsets, floats that are
            taken away behind the scale; ``"e2m1"`` for floats of 4 bits in groups that share a step; ``"e4m3"`` for
            floats of 8 bits, whose inputs are not rounded: ``input_bits`` is 0.
        input_scale: of inputs of 8 bits whose rounding is given; None: it follows from them.
        whole_rows: inputs of 8 bits have one scale for a row, however many groups there are.
    """

    bits: int
    group_size: int
    input_bits: int
    zeros: bool = False
    code: str = "int"
    input_scale: InputScale | None = None
    whole_rows: bool = False

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"code={self.code!r} is not supported; use one of {', '.join(CODES)}")
        bits, input_bits = _WIDTHS[self.code]
        if self.bits not in bits:
            raise ValueError(f"bits={self.bits} is not supported; use {' or '.join(map(str, bits))}")
        if self.input_bits not in input_bits:
            raise ValueError(
                f"input_bits={self.input_bits} is not supported; use {' or '.join(map(str, input_bits))}"
            )
        if self.zeros and self.code != "int":
            raise ValueError("zeros=True is not supported; floats have none of their own, and affine codes offsets")
        if self.input_scale is not None:
            if (self.bits, self.group_size, self.input_bits, self.code) != (8, 0, 8, "int"):
                raise ValueError(
                    f"input_scale={self.input_scale} is for 8 bits on both sides and one scale per output"
                )
            check_input_scale(*self.input_scale)
        if self.whole_rows and (self.input_bits != 8 or not self.group_size):
            raise ValueError("whole_rows=True is for inputs of 8 bits and weights in groups")
        if self.group_size not in SHARED_STEPS:
            if self.code in ("e2m1", "affine"):
                raise ValueError(f"group_size={self.group_size} is not supported; use 32 or 16")
            check_group_size(self.group_size)

    @property
    def heads(self) -> int:
        """Groups that share a step; 1 where they hold whole steps."""
        return PANEL // self.group_size if 0 < self.group_size < PANEL else 1

    def arguments(self, order: torch.Tensor | None = None) -> tuple[Any, ...]:
        """What ``pagoda::quantized_linear`` takes behind the number of outputs, for a weight with that order."""
        given: tuple[Any, ...] = () if self.input_scale is None else tuple(self.input_scale)
        if self.whole_rows:
            given = (0.0, 0, True)
        return self.bits, self.group_size, self.input_bits, self.zeros, order, self.code, *given

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields as integers, for operators that take several schemes."""
        code = CODES.index(self.code)
        return self.bits, self.group_size, self.input_bits, int(self.zeros), code, int(self.whole_rows)

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Quantization:
        """The scheme whose :attr:`numbers` these are; those that are left out are 0."""
        bits, group_size, input_bits, zeros, code, whole_rows = (*numbers, 0, 0)[:6]
        return cls(bits, group_size, input_bits, bool(zeros), CODES[code], whole_rows=bool(whole_rows))

    @property
    def head_bytes(self) -> int:
        """Bytes of the scales and zeros of a group of a panel."""
        return PANEL * (8 if self.code == "affine" else 5 if self.zeros else 4)


def check_group_size(group_size: int) -> None:
    """Raise ``ValueError`` unless groups of this size can be stored."""
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 0 or group_size % PANEL:
        raise ValueError(
            f"group_size={group_size!r} is not supported; use a multiple of {PANEL}, or 0 for one scale per output"
        )


def check_input_scale(scale: float, offset: int) -> None:
    """Raise ``ValueError`` unless inputs can be rounded so."""
    if not (0 < scale < math.inf and scale == struct.unpack("f", struct.pack("f", scale))[0]):
        raise ValueError(f"input_scale={scale!r} is not supported; give a positive float32 number")
    if offset not in range(-128, 128):
        raise ValueError(f"input_offset={offset!r} is not supported; use one from -128 to 127")


def pack_matrices(matrices: Sequence[torch.Tensor], scheme: Quantization) -> torch.Tensor:
    """Lay out matrices for the kernel, one behind the other: stored ones as they are, others rounded.

    Args:
        matrices: ``[out, in]``, as :func:`pack_stored` or :func:`quantize_weight` takes them. If they are the rows of
            one weight, and all but the last fill whole panels, they become that weight.
        scheme: of all of them.

    Returns:
        1-d uint8.
    """
    sizes = [packed_bytes(len(matrix), matrix.shape[1], scheme) for matrix in matrices]
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    advise_huge_pages(packed)
    for matrix, into in zip(matrices, packed.split(sizes), strict=True):
        if isinstance(matrix, StoredWeight):
            pack_stored(matrix, into)
        else:
            quantize_weight(matrix.detach(), scheme, into)
    return packed


def quantize_weight(weight: torch.Tensor, scheme: Quantization, into: torch.Tensor | None = None) -> torch.Tensor:
    """Round a matrix and lay it out for the kernel.

    8 bits: symmetric, ``max|w| / 127`` of a group is its scale. 4 bits: numbers from -8 to 7; the scale is the one
    with the least squared error among 19 values for the group's largest entry (the search of llama.cpp's k-quants).

    Args:
        weight: ``[out, in]``, fp32, bf16 or fp16, of any strides, on the CPU.
        scheme: how.
        into: memory for the result.

    Returns:
        1-d uint8: about ``out · in · bits / 8`` bytes and 4 for each group of each output. Groups with a NaN or an
        infinity are NaN.
    """
    outputs, inputs = weight.shape
    kernel = kernel_function("pagoda_quantize_weight")
    code = FLOAT_CODES.get(weight.dtype)
    if kernel is None or code is None or not weight.numel() or scheme.heads > 1:
        laid = pack_weight(*round_weight(weight, scheme), scheme)
        return laid if into is None else into.copy_(laid)
    packed = torch.empty(packed_bytes(outputs, inputs, scheme), dtype=torch.uint8) if into is None else into
    kernel(
        _ARGUMENTS.pack(
            weight.data_ptr(),
            packed.data_ptr(),
            code,
            inputs,
            outputs,
            weight.stride(1),
            weight.stride(0),
            scheme.bits,
            scheme.group_size,
            torch.get_num_threads(),
        )
    )
    return packed


def unpackable(form: WeightFormat) -> str:
    """The reason why the kernel reads no codes of this format; "" when it does."""
    odd = form.group_size not in SHARED_STEPS and (form.group_size % PANEL or form.code == "affine")
    return f"no kernel for groups of {form.group_size}" if odd else ""


def scheme_of(form: WeightFormat, input_bits: int | None = 16, input_scale: InputScale | None = None) -> Quantization:
    """The scheme by which the kernel reads weights that are stored so. Their layout depends on ``form`` alone.

    Twice the floats of e2m1 are integers from -12 to 12, which take a byte each in groups of whole steps.

    Args:
        form: of the weights.
        input_bits: 16, which inputs keep, or all where weights are floats of 8 bits; 8 or None: 8 where the weights
            were made for inputs of 8 bits with a scale for each row, or ``input_scale``.
        input_scale: of the inputs, if the format stores it with the weight; without it they keep 16 bits.
    """
    if form.code == "e4m3":
        return Quantization(8, form.group_size, 0, code="e4m3")
    if form.code == "e2m1":
        shared = form.group_size in SHARED_STEPS
        return Quantization(4 if shared else 8, form.group_size, 16, code="e2m1" if shared else "int")
    as_made = input_bits != 16 and form.input_bits == 8 and form.static_inputs is (input_scale is not None)
    given, whole_rows = (input_scale, bool(form.group_size)) if as_made else (None, False)
    return Quantization(form.bits, form.group_size, 8 if as_made else 16, form.zeros, form.code, given, whole_rows)


def pack_stored(weight: StoredWeight, into: torch.Tensor | None = None) -> torch.Tensor:
    """Lay a stored weight out for the kernel; its codes, scales and zeros stay what they are.

    Groups with a NaN, which only codes of e4m3 can be, get NaN for a scale.

    Args:
        weight: ``[out, in]``, of a format that is not ``unpackable``.
        into: memory for the result.
    """
    kernel = kernel_function("pagoda_pack_stored") if weight.codes.numel() else None
    if kernel is None:
        laid = pack_stored_reference(weight)
        return laid if into is None else into.copy_(laid)
    scheme, (outputs, stored) = scheme_of(weight.form), weight.codes.shape
    size = packed_bytes(outputs, stored * weight.form.per_byte, scheme)
    packed = torch.empty(size, dtype=torch.uint8) if into is None else into
    parts = weight.codes, weight.scales, weight.zeros
    run_stored_kernel(kernel, packed, weight.form, *parts, packed_bits=scheme.bits)
    return packed


def pack_stored_reference(weight: StoredWeight) -> torch.Tensor:
    """:func:`pack_stored` in torch."""
    scheme, scales = scheme_of(weight.form), weight.scales.float()
    if scheme.code == "e2m1":
        return _pack_codes(unpacked_pairs(weight.codes), scales / 2, None, scheme)
    if scheme.code == "e4m3":
        bad = weight.codes.bitwise_and(127) == 127
        if bad.any():
            groups = aten.pad(bad, (0, -bad.shape[1] % (scheme.group_size or bad.shape[1])))
            scales = scales.masked_fill(groups.unflatten(1, (scales.shape[1], -1)).any(-1), torch.nan)
        return _pack_codes(weight.codes, scales, None, scheme)
    values = values_of(weight.codes, weight.form)
    if weight.form.code == "e2m1":
        values, scales = 2 * values + 128, scales / 2
    return _pack_codes(values.to(torch.uint8), scales, weight.zeros, scheme)


def packed_bytes(outputs: int, inputs: int, scheme: Quantization) -> int:
    """Bytes of a matrix as the kernel reads it."""
    panels, steps = -(-outputs // PANEL), -(-inputs // PANEL)
    heads = scheme.heads * steps if scheme.heads > 1 else _num_groups(inputs, scheme)
    return panels * (heads * scheme.head_bytes + steps * PANEL * PANEL * scheme.bits // 8)


def round_weight(weight: torch.Tensor, scheme: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers ``[out, in]`` int8 and the scales ``[out, groups]`` float32 of a matrix.

    What :func:`quantize_weight` stores, up to the rounding of ties.
    """
    outputs, inputs = weight.shape
    size, groups = scheme.group_size or max(inputs, 1), _num_groups(inputs, scheme)
    numbers = aten.pad(weight.float(), (0, groups * size - inputs)).view(outputs, groups, size)
    far = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))
    finite = numbers.isfinite().all(-1, keepdim=True)
    usable = finite & (far.abs() > 1e-30)
    far = torch.where(usable, far, 1.0)
    if scheme.bits == 8:
        whole = (numbers * (127 / far.abs())).round().clamp(-127, 127)
        scales = far.abs() / 127
    else:
        whole, scales = search_scales(numbers, far)
    whole = torch.where(usable, whole, 0.0).to(torch.int8)
    scales = torch.where(usable, scales, torch.where(finite, 0.0, torch.nan))
    return whole.view(outputs, -1)[:, :inputs], scales[..., 0]


def search_scales(
    numbers: torch.Tensor, far: torch.Tensor, importance: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of 4-bit groups with the least squared error, and the integers from -8 to 7 with them.

    Args:
        numbers: ``[..., size]`` float32, a group's.
        far: ``[..., 1]``, the number of the largest magnitude in each group, not 0; the search tries 19 values around
            8 for it.
        importance: what the squared error of a number counts, broadcast over ``numbers``; not negative.

    Returns:
        ``[..., size]`` and ``[..., 1]``, both float32; the scale is 0 where nothing counts.
    """
    best = torch.full_like(far, -1.0)
    whole, scales = torch.zeros_like(numbers), torch.zeros_like(far)
    for place in _CANDIDATES:
        tried = (numbers * (-place / far)).round().clamp(-8, 7)
        weighted = importance * tried
        products = (numbers * weighted).sum(-1, keepdim=True)
        squares = (tried * weighted).sum(-1, keepdim=True)
        counts = squares > 0
        gain = torch.where(counts, products * products / squares, 0.0)
        better = gain > best
        best, whole = torch.where(better, gain, best), torch.where(better, tried, whole)
        scales = torch.where(better, torch.where(counts, products / squares, 0.0), scales)
    return whole, scales


def pack_weight(whole: torch.Tensor, scales: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    """Lay out for the kernel what :func:`round_weight` gave."""
    codes = (whole.to(torch.int16) + (1 << (scheme.bits - 1))).to(torch.uint8)
    return _pack_codes(codes, scales, None, scheme)


def _pack_codes(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, scheme: Quantization
) -> torch.Tensor:
    """Lay out unsigned codes ``[out, in]``, float32 scales, and uint8 zeros or float32 offsets ``[out, groups]``."""
    outputs, inputs = codes.shape
    panels, steps = -(-outputs // PANEL), -(-inputs // PANEL)
    per_group = scheme.heads
    heads = per_group * steps if per_group > 1 else scales.shape[1]
    rows = panels * PANEL - outputs
    # Beyond the end inputs are zeros, and so are scales.
    unsigned = aten.pad(codes, (0, steps * PANEL - inputs, 0, rows))
    if scheme.code == "e4m3":
        tiles = unsigned.view(panels, PANEL, steps, PANEL // 2, 2).permute(0, 2, 3, 1, 4)
    else:
        tiles = unsigned.view(panels, PANEL // _TILE, _TILE, steps, _TILE, 4).permute(0, 3, 1, 4, 2, 5)
    if scheme.bits == 4:
        tiles = tiles[:, :, :, : _TILE // 2] | tiles[:, :, :, _TILE // 2 :] << 4
    stored = tiles.reshape(panels, steps, -1)

    def of_panels(table: torch.Tensor) -> torch.Tensor:
        padded = aten.pad(table, (0, heads - table.shape[1], 0, rows)).view(panels, PANEL, heads)
        return padded.transpose(1, 2).contiguous().view(torch.uint8).view(panels, heads, -1)

    head = of_panels(scales)
    if zeros is not None:
        head = torch.cat([head, of_panels(zeros)], 2)
    in_group = _steps_in_group(inputs, scheme)
    parts = []
    for g in range(heads // per_group):
        parts.append(head[:, g * per_group : (g + 1) * per_group])
        parts.append(stored[:, g * in_group : (g + 1) * in_group])
    return torch.cat([part.reshape(panels, -1) for part in parts], 1).flatten()


def unpack_weight(
    packed: torch.Tensor, outputs: int, inputs: int, scheme: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers ``[out, in]`` and the scales ``[out, groups]`` float32 of a matrix laid out for the kernel.

    Integers are int8, int16 where groups have zeros of their own, which are taken away; of e2m1 these are twice
    the floats. Of e4m3 they are the floats, and of affine codes the weights themselves.
    """
    panels, steps, groups = -(-outputs // PANEL), -(-inputs // PANEL), _num_groups(inputs, scheme)
    in_group, step_bytes = _steps_in_group(inputs, scheme), PANEL * PANEL * scheme.bits // 8
    per_group, size = scheme.heads, scheme.head_bytes
    rows = packed.view(panels, -1)
    heads, steps_of, at = [], [], 0
    for first in range(0, steps, in_group):
        begin = at + per_group * size
        end = begin + min(in_group, steps - first) * step_bytes
        heads.append(rows[:, at:begin].reshape(panels, per_group, size))
        steps_of.append(rows[:, begin:end].reshape(panels, -1, step_bytes))
        at = end
    head = torch.cat(heads, 1)

    def of_outputs(table: torch.Tensor) -> torch.Tensor:
        return table.transpose(1, 2).reshape(panels * PANEL, -1)[:outputs, :groups]

    scales = of_outputs(head[..., : PANEL * 4].contiguous().view(torch.float32))
    stored = torch.cat(steps_of, 1)
    if scheme.code == "e4m3":
        codes = stored.view(panels, steps, PANEL // 2, PANEL, 2).permute(0, 3, 1, 2, 4)
        codes = codes.reshape(panels * PANEL, steps * PANEL)[:outputs, :inputs]
        return codes.contiguous().view(torch.float8_e4m3fn).float(), scales
    stored = stored.view(panels, steps, PANEL // _TILE, -1, _TILE, 4)
    if scheme.bits == 4:
        stored = torch.cat([stored & 15, stored >> 4], 3)
    unsigned = stored.permute(0, 2, 4, 1, 3, 5).reshape(panels * PANEL, steps * PANEL)[:outputs, :inputs]
    if scheme.code == "e2m1":
        twice = torch.tensor([2 * x for x in (*E2M1, *(-x for x in E2M1))], dtype=torch.int8)
        return twice[unsigned.int()], scales
    if scheme.code == "affine":
        offsets = of_outputs(head[..., PANEL * 4 :].contiguous().view(torch.float32))
        products = unsigned.float() * spread_over_inputs(scales, inputs, scheme)
        return products - spread_over_inputs(offsets, inputs, scheme), scales
    if not scheme.zeros:
        return (unsigned.to(torch.int16) - (1 << (scheme.bits - 1))).to(torch.int8), scales
    zeros = of_outputs(head[..., PANEL * 4 :]).to(torch.int16)
    return unsigned.to(torch.int16) - spread_over_inputs(zeros, inputs, scheme), scales


def spread_over_inputs(table: torch.Tensor, inputs: int, scheme: Quantization) -> torch.Tensor:
    """``[out, in]``: of each input what ``[out, groups]`` holds of its group."""
    return table.repeat_interleave(scheme.group_size or max(inputs, 1), 1)[:, :inputs]


def restored_weight(whole: torch.Tensor, scales: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    """The matrix ``[out, in]`` in float32 that what ``unpack_weight`` or ``round_weight`` gave stands for."""
    if scheme.code == "affine":
        return whole
    return whole.float() * spread_over_inputs(scales, whole.shape[1], scheme)


def _num_groups(inputs: int, scheme: Quantization) -> int:
    return max(1, -(-inputs // scheme.group_size)) if scheme.group_size else 1


def _steps_in_group(inputs: int, scheme: Quantization) -> int:
    return max(scheme.group_size // PANEL, 1) if scheme.group_size else -(-inputs // PANEL)
