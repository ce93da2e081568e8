"""Reads MXFP4 experts, as gpt-oss stores them: blocks of 32 floats of 4 bits, each with a power of two."""

from __future__ import annotations

import re

import torch

from ...runtime.ops.linear.weight_format import WeightFormat
from .parts import BadTensor, Quantized, powers_of_two

LEAVES = re.compile(r"(\w+)_(blocks|scales)")


def read_mxfp4(module: Quantized) -> dict[str, torch.Tensor]:
    """Return the weights ``[experts, in, out]`` of ``*_blocks`` uint8 ``[experts, out, in / 32, 16]`` and
    ``*_scales`` uint8 ``[experts, out, in / 32]``.

    Raises:
        BadTensor: a tensor is missing or has a wrong shape.
    """
    found: dict[str, torch.Tensor] = {}
    for leaf in module.tensors:
        match = LEAVES.fullmatch(leaf)
        if match is None:
            found[f"{module.name}.{leaf}"] = module.take(leaf)
        elif match[2] == "blocks":
            found[f"{module.name}.{match[1]}"] = _weight(module, match[1])
        elif f"{match[1]}_blocks" not in module.tensors:
            raise BadTensor(f"it has {leaf} but lacks {module.name + '.' + match[1] + '_blocks'!r}")
    return found


def _weight(module: Quantized, name: str) -> torch.Tensor:
    blocks = module.take(f"{name}_blocks", torch.uint8, dim=4)
    exponents = module.take(f"{name}_scales", torch.uint8, dim=3)
    if blocks.shape[:3] != exponents.shape or blocks.shape[3] != 16:
        raise module.bad(f"{name}_blocks", f"expected 16 bytes for each of its scales {list(exponents.shape)}")
    scales = powers_of_two(exponents)
    module.check_scales(f"{name}_scales", scales)
    return module.stored(WeightFormat("e2m1", 4, 32, "bf16"), blocks.flatten(-2), scales, transposed=True)
