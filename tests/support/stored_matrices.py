"""Matrices as each format of quantized checkpoints stores them, and what the stored numbers mean.

A writer returns tensors by the last part of their names, and the dense matrix in float32, which is computed from the
numbers before they are packed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Range = tuple[float, float]
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of the eight outputs of a word, the one in each of its places."""


@dataclass(frozen=True)
class Numbers:
    """A matrix in integers: ``(codes - zeros) * scales`` of each group.

    Attributes:
        codes: int64 ``[out, in]``, unsigned.
        scales: ``[out, groups]``.
        zeros: int64 ``[out, groups]``.
        group: int64 ``[in]``, of each input.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: torch.Tensor

    @property
    def dense(self) -> torch.Tensor:
        """float32 ``[out, in]``."""
        return (self.codes - self.zeros[:, self.group]).float() * self.scales.float()[:, self.group]


def numbers_of(
    weight: torch.Tensor,
    bits: int,
    size: int,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    shuffled: bool = False,
) -> Numbers:
    """A matrix rounded to nearest; with ``shuffled`` the groups hold inputs from all over."""
    outputs, inputs = weight.shape
    size = size or inputs
    group = torch.arange(inputs) // size
    if shuffled:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    groups, top = int(group.max()) + 1, (1 << bits) - 1
    codes = torch.zeros(outputs, inputs, dtype=torch.int64)
    scales = torch.zeros(outputs, groups, dtype=dtype)
    zeros = torch.full((outputs, groups), 1 << (bits - 1))
    for g in range(groups):
        part = weight[:, group == g].float()
        if symmetric:
            scales[:, g] = (part.abs().amax(1) / (top / 2)).to(dtype)
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales[:, g] = ((high - low) / top).to(dtype)
            zeros[:, g] = (-low / scales[:, g].float()).round().clamp(0, top).long()
        rounded = (part / scales[:, g : g + 1].float()).round().long() + zeros[:, g : g + 1]
        codes[:, group == g] = rounded.clamp(0, top)
    return Numbers(codes, scales, zeros, group)


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers along the last dim as one stream of bits in int32, padded at its end."""
    *lead, count = numbers.shape
    flat = numbers.reshape(-1, count).tolist()
    width = -(-count * bits // 32)
    rows = []
    for row in flat:
        stream = sum(number << (bits * i) for i, number in enumerate(row))
        rows.append([(stream >> (32 * i)) & 0xFFFFFFFF for i in range(width)])
    unsigned = torch.tensor(rows, dtype=torch.int64)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32).view(*lead, width)


def gptq(weight: torch.Tensor, bits: int, size: int, version: str, **how: Any) -> tuple[Tensors, torch.Tensor]:
    """Of the first version, 1 is taken off all zeros of a word at once, so that a 0 borrows; of 3 bits, off each."""
    found = numbers_of(weight, bits, size, **how)
    zeros = words(found.zeros.T, bits)
    if version == "gptq":
        ones = sum(1 << place for place in range(0, 32, bits))
        zeros = words((found.zeros.T - 1) % 8, bits) if bits == 3 else zeros - torch.tensor(ones, dtype=torch.int32)
    return {
        "qweight": words(found.codes, bits).T.contiguous(),
        "qzeros": zeros,
        "scales": found.scales.T.contiguous(),
        "g_idx": found.group.to(torch.int32),
    }, found.dense


def awq(weight: torch.Tensor, size: int, **how: Any) -> tuple[Tensors, torch.Tensor]:
    found = numbers_of(weight, 4, size, **how)

    def in_words(numbers: torch.Tensor) -> torch.Tensor:
        return words(numbers.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4)

    return {
        "qweight": in_words(found.codes.T),
        "qzeros": in_words(found.zeros.T),
        "scales": found.scales.T.contiguous(),
    }, found.dense


def packed(weight: torch.Tensor, bits: int, size: int, **how: Any) -> tuple[Tensors, torch.Tensor]:
    found = numbers_of(weight, bits, size, dtype=torch.bfloat16, **how)
    tensors = {
        "weight_packed": words(found.codes, bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not how.get("symmetric", True):
        tensors["weight_zero_point"] = words(found.zeros.T, bits).T.contiguous()
    if how.get("shuffled"):
        tensors["weight_g_idx"] = found.group.to(torch.int32)
    return tensors, found.dense


def of_bytes(weight: torch.Tensor, size: int = 0, *, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    found = numbers_of(weight, 8, size, symmetric=symmetric, dtype=torch.float32)
    tensors = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales}
    if not symmetric:
        tensors["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return tensors, found.dense


def bytes_of_one_scale(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    found, dense = of_bytes(weight.reshape(1, -1))
    return {"weight": found["weight"].view(weight.shape), "weight_scale": found["weight_scale"][0]}, dense.view_as(
        weight
    )


def slim(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = of_bytes(weight)
    return {**tensors, "weight_offset": torch.zeros(len(weight), 1)}, dense


def slim_w4a8(weight: torch.Tensor, size: int = 0, plain: bool = False) -> tuple[Tensors, torch.Tensor]:
    """Two outputs in a byte; the sums of the weights, of what has more inputs than outputs in 16 parts of them; in
    groups of ``size`` a factor of the output's scale for each. With ``plain`` a byte for a number, and no sums."""
    found = numbers_of(weight, 4, size, dtype=torch.bfloat16 if size else torch.float32)
    tensors = {"weight_scale": found.scales, "weight_offset": torch.zeros(len(weight), 1)}
    if size:  # exact products: a chip takes 19 bits of them
        of_output = found.scales.float().amax(1, keepdim=True).log2().floor().exp2() / 16
        second = found.scales.float() / of_output
        found = replace(found, scales=of_output * second)
        tensors |= {"weight_scale": of_output, "weight_scale_second": second}
        tensors["weight_offset_second"] = torch.zeros_like(second)
    numbers = (found.codes - 8).to(torch.int8)
    if plain:
        return {"weight": numbers, **tensors}, found.dense
    parts = 16 if weight.shape[1] > weight.shape[0] else 1
    tensors["scale_bias"] = 8 * found.dense.unflatten(1, (parts, -1)).sum(-1)
    return {"weight": (numbers[::2] & 15) + 16 * numbers[1::2], **tensors}, found.dense


def slim_static(weight: torch.Tensor, inputs: Range, bits_of_scale: bool = False) -> tuple[Tensors, torch.Tensor]:
    """Inputs between the numbers that they were seen to be, their scale a bfloat16, as of models in it:
    ``quant_bias`` is there for their offset."""
    tensors, _ = of_bytes(weight)
    codes, (low, high) = tensors["weight"], inputs
    step = torch.tensor([(high - low) / 255]).bfloat16().float()
    offset = (-128 - low / step).round()
    unit = (tensors["weight_scale"][:, 0] * step).float()
    whole = -offset.long() * codes.long().sum(1)
    return {
        "weight": codes,
        "weight_scale": tensors["weight_scale"],
        "weight_offset": torch.zeros_like(tensors["weight_scale"]),
        "input_scale": step,
        "input_offset": offset,
        "deq_scale": unit.view(torch.int32).long() if bits_of_scale else unit,
        "quant_bias": whole.to(torch.int32),
    }, codes.float() * (unit / step)[:, None]


def static_bytes(weight: torch.Tensor, inputs: Range, symmetric: bool) -> tuple[Tensors, torch.Tensor]:
    """Of compressed-tensors, whose offset is the number that stands for zero."""
    tensors, dense = of_bytes(weight)
    low, high = inputs
    step = torch.tensor([max(-low, high) / 127.5 if symmetric else (high - low) / 255])
    found = {"input_scale": step}
    if not symmetric:
        found["input_zero_point"] = (-128 - low / step).round().to(torch.int8)
    return tensors | found, dense


def e4m3(weight: torch.Tensor, high: int, wide: int, dtype: torch.dtype, leaf: str) -> tuple[Tensors, torch.Tensor]:
    """With a scale for each block; 0 outputs or inputs mean all, 1 output each."""
    outputs, inputs = weight.shape
    high, wide = high or outputs, wide or inputs
    rows, columns = torch.arange(outputs) // high, torch.arange(inputs) // wide
    grid = torch.zeros(int(rows.max()) + 1, int(columns.max()) + 1)
    for r in range(grid.shape[0]):
        for c in range(grid.shape[1]):
            grid[r, c] = weight[rows == r][:, columns == c].abs().max() / 448
    grid = grid.to(dtype)
    spread = grid.float()[rows][:, columns]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, leaf: grid[0] if grid.numel() == 1 else grid}, codes.float() * spread


def mxfp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts = weight.float().unflatten(-1, (-1, 32))
    exponents = (parts.abs().amax(-1) / 448).clamp_min(2.0**-40).log2().ceil()
    scales = torch.exp2(exponents)
    codes = (parts / scales[..., None]).to(torch.float8_e4m3fn)
    tensors = {"weight": codes.flatten(-2), "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, (codes.float() * scales[..., None]).flatten(-2)


def _e2m1(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes int64 ``[*, in]``, scales float32 ``[*, groups]`` that are powers of two, and what they mean."""
    parts = weight.float().unflatten(-1, (-1, size))
    exponents = (parts.abs().amax(-1) / 6).clamp_min(2.0**-40).log2().ceil()
    scales = torch.exp2(exponents)
    scaled = (parts / scales[..., None]).contiguous()
    codes = torch.bucketize(scaled.abs(), (E2M1[1:8] + E2M1[:7]) / 2) + 8 * (scaled < 0)
    return codes.flatten(-2), scales, (E2M1[codes] * scales[..., None]).flatten(-2)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    size = 16
    whole = torch.tensor([64.0])
    parts = weight.float().unflatten(-1, (-1, size))
    scales = (parts.abs().amax(-1) / 6 * whole).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    unit = scales.float() / whole
    codes = (parts / unit[..., None])[..., None].sub(E2M1).abs().argmin(-1)
    tensors = {"weight_packed": _pairs(codes.flatten(-2)), "weight_scale": scales, "weight_global_scale": whole}
    return tensors, (E2M1[codes] * unit[..., None]).flatten(-2)


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, dense = _e2m1(weight, 32)
    return {"weight_packed": _pairs(codes), "weight_scale": (scales.log2() + 127).to(torch.uint8)}, dense


def mxfp4_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Of experts ``[experts, in, out]``, whose blocks lie along the inputs."""
    codes, scales, dense = _e2m1(weight.mT, 32)
    blocks = _pairs(codes).unflatten(-1, (-1, 16))
    return {"_blocks": blocks, "_scales": (scales.log2() + 127).to(torch.uint8)}, dense.mT
