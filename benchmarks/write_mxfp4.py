"""Rounding of experts to MXFP4, to nearest, as gpt-oss stores them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from stored_matrices import mxfp4_blocks

_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def write_mxfp4(model: PreTrainedModel, folder: Path) -> None:
    """Write gpt-oss as a checkpoint with its experts in MXFP4; all else keeps its numbers.

    Raises:
        ValueError: the model has no such experts.
    """
    tensors = {}
    if not any(name.endswith(_EXPERTS) for name in model.state_dict()):
        raise ValueError(f"{type(model).__name__} has none of {', '.join(_EXPERTS)}; give a model of gpt-oss")
    for name, tensor in model.state_dict().items():
        if not name.endswith(_EXPERTS):
            tensors[name] = tensor
            continue
        parts = [mxfp4_blocks(expert[None])[0] for expert in tensor]  # one by one, for the memory that it takes
        for leaf in parts[0]:
            tensors[name + leaf] = torch.cat([part[leaf] for part in parts])
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    untouched = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": untouched}
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "quantization_config": stored}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
