"""Rounding to 4 bits in groups, to nearest, as a compressed-tensors checkpoint stores it (W4A16)."""

from __future__ import annotations

import torch

from torch_pagoda.checkpoint.compressed_writer import packed
from torch_pagoda.compiler.calibrate.grid import GridWeight

GROUP = 128
"""Inputs that share a scale."""


def rounded(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a linear layer's weight ``[out, in]``, by what follows the layer's name.

    Args:
        weight: a multiple of ``GROUP`` inputs; no group is all zeros.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7.5).bfloat16()
    whole = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(-2)
    return packed(GridWeight(whole, scales.float(), GROUP), torch.bfloat16)
