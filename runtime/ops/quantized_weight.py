"""Matrices of whole numbers of 8 or 4 bits, with a scale per output and group of inputs, as the CPU's kernel
reads them.

The layout (csrc/panels.h): panels of 64 outputs; a panel is its groups; a group is 64 float32 scales, then steps of
64 inputs; a step holds four tiles ``[16 (input / 4), 16 (output), 4 (input % 4)]`` of unsigned numbers around
``2^(bits - 1)``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .native import FLOAT_CODES, kernel_function
from .stored_weight import StoredWeight
from .weight_format import WeightFormat, values_of

PANEL = 64
"""Outputs of a panel, and inputs of a step; groups hold whole steps."""

LARGEST_INPUTS = 65536
"""More inputs than these might overflow the kernel's sums."""

DEFAULT_GROUP_SIZES = {8: 256, 4: 128}
"""Of weights with so many bits."""

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
        input_bits: that the input is rounded to, with a scale for each group of each row. Rounded to 16, numbers keep
            what bf16 tells apart of those that matter in a sum.
    """

    bits: int
    group_size: int
    input_bits: int

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"bits={self.bits} is not supported; use 8 or 4")
        if self.input_bits not in (8, 16):
            raise ValueError(f"input_bits={self.input_bits} is not supported; use 8 or 16")
        check_group_size(self.group_size)


def check_group_size(group_size: int) -> None:
    """Raise ``ValueError`` unless groups of this size can be stored."""
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 0 or group_size % PANEL:
        raise ValueError(
            f"group_size={group_size!r} is not supported; use a multiple of {PANEL}, or 0 for one scale per output"
        )


def quantize_weight(weight: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    """Round a matrix and lay it out for the kernel.

    8 bits: symmetric, ``max|w| / 127`` of a group is its scale. 4 bits: numbers from -8 to 7; the scale is the one
    with the least squared error among 19 places for the group's farthest entry (the search of llama.cpp's k-quants).

    Args:
        weight: ``[out, in]``, fp32, bf16 or fp16, of any strides, on the CPU.
        scheme: how.

    Returns:
        1-d uint8: about ``out · in · bits / 8`` bytes and 4 for each group of each output. Groups with a NaN or an
        infinity are NaN.
    """
    outputs, inputs = weight.shape
    kernel = kernel_function("pagoda_quantize_weight")
    code = FLOAT_CODES.get(weight.dtype)
    if kernel is None or code is None or not weight.numel():
        return pack_weight(*round_weight(weight, scheme), scheme)
    packed = torch.empty(packed_bytes(outputs, inputs, scheme), dtype=torch.uint8)
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
    if form.code != "int" or form.zeros or form.ordered:
        return f"no kernel for weights that are stored as {form}"
    return f"no kernel for groups of {form.group_size}" if form.group_size % PANEL else ""


def pack_stored(weight: StoredWeight) -> torch.Tensor:
    """Lay a stored weight out for the kernel; its codes and scales stay what they are.

    Args:
        weight: ``[out, in]``, of a format that is not ``unpackable``.
    """
    form = weight.form
    whole = (values_of(weight.codes, form) - (1 << (form.bits - 1))).to(torch.int8)
    return pack_weight(whole, weight.scales.float(), Quantization(form.bits, form.group_size, 16))


def packed_bytes(outputs: int, inputs: int, scheme: Quantization) -> int:
    """Bytes of a matrix as the kernel reads it."""
    panels, steps = -(-outputs // PANEL), -(-inputs // PANEL)
    return panels * (_num_groups(inputs, scheme) * PANEL * 4 + steps * PANEL * PANEL * scheme.bits // 8)


def round_weight(weight: torch.Tensor, scheme: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole numbers ``[out, in]`` int8 and the scales ``[out, groups]`` float32 of a matrix.

    What :func:`quantize_weight` stores, up to the rounding of ties.
    """
    outputs, inputs = weight.shape
    size, groups = scheme.group_size or max(inputs, 1), _num_groups(inputs, scheme)
    numbers = F.pad(weight.float(), (0, groups * size - inputs)).view(outputs, groups, size)
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
    """The scales of 4-bit groups with the least squared error, and the whole numbers from -8 to 7 with them.

    Args:
        numbers: ``[..., size]`` float32, a group's.
        far: ``[..., 1]``, the farthest of each group, not 0; 19 places around 8 are tried for it.
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
    outputs, inputs = whole.shape
    panels, steps, groups = -(-outputs // PANEL), -(-inputs // PANEL), scales.shape[1]
    unsigned = F.pad(whole, (0, steps * PANEL - inputs, 0, panels * PANEL - outputs)).to(torch.int16)
    unsigned = (unsigned + (1 << (scheme.bits - 1))).to(torch.uint8)
    tiles = unsigned.view(panels, PANEL // _TILE, _TILE, steps, _TILE, 4).permute(0, 3, 1, 4, 2, 5)
    if scheme.bits == 4:
        tiles = tiles[:, :, :, : _TILE // 2] | tiles[:, :, :, _TILE // 2 :] << 4
    stored = tiles.reshape(panels, steps, -1)
    rows = F.pad(scales, (0, 0, 0, panels * PANEL - outputs)).view(panels, PANEL, groups)
    heads = rows.transpose(1, 2).contiguous().view(torch.uint8).view(panels, groups, PANEL * 4)
    in_group = _steps_in_group(inputs, scheme)
    parts = [part for g in range(groups) for part in (heads[:, g], stored[:, g * in_group : (g + 1) * in_group])]
    return torch.cat([part.reshape(panels, -1) for part in parts], 1).flatten()


def unpack_weight(
    packed: torch.Tensor, outputs: int, inputs: int, scheme: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole numbers ``[out, in]`` int8 and the scales ``[out, groups]`` float32 of a matrix laid out for the
    kernel."""
    panels, steps, groups = -(-outputs // PANEL), -(-inputs // PANEL), _num_groups(inputs, scheme)
    in_group, step_bytes = _steps_in_group(inputs, scheme), PANEL * PANEL * scheme.bits // 8
    rows = packed.view(panels, -1)
    heads, steps_of, at = [], [], 0
    for g in range(groups):
        end = at + PANEL * 4 + min(in_group, steps - g * in_group) * step_bytes
        heads.append(rows[:, at : at + PANEL * 4])
        steps_of.append(rows[:, at + PANEL * 4 : end].reshape(panels, -1, step_bytes))
        at = end
    scales = torch.stack(heads, 1).contiguous().view(torch.float32).transpose(1, 2)
    stored = torch.cat(steps_of, 1).view(panels, steps, PANEL // _TILE, -1, _TILE, 4)
    if scheme.bits == 4:
        stored = torch.cat([stored & 15, stored >> 4], 3)
    unsigned = stored.permute(0, 2, 4, 1, 3, 5).reshape(panels * PANEL, steps * PANEL)
    whole = (unsigned.to(torch.int16) - (1 << (scheme.bits - 1))).to(torch.int8)
    return whole[:outputs, :inputs], scales.reshape(panels * PANEL, groups)[:outputs]


def restored_weight(whole: torch.Tensor, scales: torch.Tensor, scheme: Quantization) -> torch.Tensor:
    """The matrix ``[out, in]`` in float32 that whole numbers and scales stand for."""
    size = scheme.group_size or max(whole.shape[1], 1)
    return whole.float() * scales.repeat_interleave(size, 1)[:, : whole.shape[1]]


def _num_groups(inputs: int, scheme: Quantization) -> int:
    return max(1, -(-inputs // scheme.group_size)) if scheme.group_size else 1


def _steps_in_group(inputs: int, scheme: Quantization) -> int:
    return (scheme.group_size or -(-inputs // PANEL) * PANEL) // PANEL
