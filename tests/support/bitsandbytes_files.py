"""Tensors as bitsandbytes saves them, and what they mean number by number, after its own formulas."""

from __future__ import annotations

import json
from typing import Any

import torch

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# 12 for its largest, as the package makes them.
FP4 = tuple(sign * size / 12 for sign in (1, -1) for size in (0.0, 0.0625, 8, 12, 4, 6, 2, 3))
TABLES = {"nf4": NF4, "fp4": FP4}
NESTED_BLOCK = 256


def four_bits(
    weight: torch.Tensor, kind: str, *, block: int = 64, nested: bool = True, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix in codes of 4 bits: tensors by what follows the name of its module, and the matrix that they mean."""
    table = torch.tensor(TABLES[kind], dtype=torch.float32)
    numbers = weight.float().flatten()
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % block)).view(-1, block)
    absmax = padded.abs().amax(1)
    codes = (padded / absmax.clamp_min(1e-30)[:, None]).flatten()[: len(numbers)]
    codes = (codes[:, None] - table).abs().argmin(1)
    tensors: dict[str, torch.Tensor] = {"weight.quant_map": table}
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": str(dtype).removeprefix("torch.")}
    state["shape"] = list(weight.shape)
    scales = absmax
    if nested:
        offset = absmax.mean()
        rest = absmax - offset
        places = torch.linspace(-1, 1, 256)
        of_block = torch.nn.functional.pad(rest, (0, -len(rest) % NESTED_BLOCK)).view(-1, NESTED_BLOCK).abs().amax(1)
        of_block = of_block.clamp_min(1e-30)
        own = of_block.repeat_interleave(NESTED_BLOCK)[: len(rest)]
        numbers_of = ((rest / own)[:, None] - places).abs().argmin(1)
        tensors |= {"weight.absmax": numbers_of.to(torch.uint8), "weight.nested_absmax": of_block}
        tensors["weight.nested_quant_map"] = places
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset.item()}
        scales = places[numbers_of] * own + offset
    else:
        tensors["weight.absmax"] = absmax
    means = [table[code] * scales[i // block] for i, code in enumerate(codes.tolist())]
    pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    tensors["weight"] = (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, torch.stack(means).to(dtype).view(weight.shape)


def eight_bits(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix in rows of int8, and what it means in float32."""
    sizes = weight.float().abs().amax(1)
    codes = (weight.float() * (127 / sizes.clamp_min(1e-30))[:, None]).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": sizes, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * sizes[:, None] * 7.874015748031496e-3


CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_4bit": False, "load_in_8bit": True, "bnb_4bit_quant_type": "fp4"},
}
"""What a config says beside the method's name."""
