"""Checkpoints of compressed-tensors with 4 bits a weight, rounded to nearest, that vLLM reads as well (W4A16)."""

from __future__ import annotations

from typing import Any

import torch

GROUP = 128
"""Inputs that share a scale."""
BITS_PER_WEIGHT = 4 + 16 / GROUP
"""Of a weight, its share of the scale included."""


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a linear layer's weight ``[out, in]``, by what follows the layer's name.

    Args:
        weight: a multiple of ``GROUP`` inputs.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7.5).bfloat16()
    codes = ((groups / scales.float()[..., None]).round() + 8).clamp(0, 15).flatten(-2).to(torch.uint8)
    return {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def quantization_config() -> dict[str, Any]:
    """What the checkpoint's config says of them; the head stays as it is."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
