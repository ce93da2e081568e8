"""Rounding of experts to MXFP4, to nearest, as gpt-oss stores them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

GROUP = 32
"""Inputs that share a scale."""
_BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Where one magnitude of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) gives way to the next."""
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 ``[out, in / 32, 16]`` and biased exponents uint8 ``[out, in / 32]`` of a weight ``[in, out]``.

    Args:
        weight: of one expert; a multiple of ``GROUP`` inputs.
    """
    groups = weight.mT.float().unflatten(-1, (-1, GROUP))
    exponents = (groups.abs().amax(-1) / 6).clamp_min(2.0**-126).log2().ceil()
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = torch.bucketize(scaled.abs(), _BETWEEN) + 8 * (scaled < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def write_mxfp4(model: PreTrainedModel, folder: Path) -> None:
    """Write gpt-oss as a checkpoint with its experts in MXFP4; all else keeps its numbers."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(_EXPERTS):
            tensors[name] = tensor
            continue
        parts = zip(*(rounded(expert) for expert in tensor), strict=True)
        for leaf, stacked in zip(("blocks", "scales"), parts, strict=True):
            tensors[f"{name}_{leaf}"] = torch.stack(stacked)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    untouched = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": untouched}
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "quantization_config": stored}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
