"""Checkpoints of tiny models with a head that predicts a further token."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tiny_models import build_tiny_model

QWEN = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "post_norm.": "norm.",
    "mtp_block.": "layers.0.",
}
DEEPSEEK = {"post_norm.": "shared_head.norm.", "mtp_block.": ""}


def make_head(model: PreTrainedModel) -> MtpModel:
    """transformers' head for a model, with random weights that let every part count."""
    model = copy.deepcopy(model)
    text: Any = model.config.get_text_config(decoder=True)
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None):
        text.mtp_layer_types = ["full_attention"]
    head = MtpModel(model, 1).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in head.layers.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight + 0.2 * noise if "norm" in name else noise / weight.shape[-1] ** 0.5)
    return head


def save_with_head(model: PreTrainedModel, head: MtpModel, folder: Path) -> None:
    """Write a checkpoint with the names that published ones of its kind have."""
    model.save_pretrained(folder)
    text: Any = model.config.get_text_config(decoder=True)
    is_qwen = text.model_type.startswith("qwen")
    prefix, names = ("mtp.", QWEN) if is_qwen else (f"model.layers.{text.num_hidden_layers}.", DEEPSEEK)
    state = {}
    for name, tensor in head.layers[0].state_dict().items():
        for own, stored in names.items():
            name = re.sub(rf"^{re.escape(own)}", stored, name)
        for key, weight in _of_experts(name, tensor).items():
            state[prefix + key] = weight.clone()
    file = folder / "model.safetensors"
    save_file({**load_file(file), **state}, file, metadata={"format": "pt"})


def _of_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if name.endswith("experts.gate_up_proj"):
        halves = {"gate_proj": 0, "up_proj": 1}
        return {
            name.replace("gate_up_proj", f"{expert}.{half}.weight"): both.chunk(2)[at]
            for expert, both in enumerate(tensor)
            for half, at in halves.items()
        }
    if name.endswith("experts.down_proj"):
        return {name.replace("down_proj", f"{i}.down_proj.weight"): weight for i, weight in enumerate(tensor)}
    return {name: tensor}


def oracle() -> tuple[PreTrainedModel, MtpModel]:
    """A model that goes round a circle of its tokens, and a head that knows it: from the hidden row of the token
    before alone it tells that of the newest one, from which the model's output matrix reads the next."""
    size = 64
    model = build_tiny_model("glm4_moe", vocab_size=size, hidden_size=size)
    head = make_head(model)
    rows, _ = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)))
    follows = (torch.arange(size) * 5 + 3) % size
    with torch.no_grad():
        for layer in (*model.model.layers, head.layers[0].mtp_block):
            for name, weight in layer.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weight.zero_()
        model.get_input_embeddings().weight.copy_(rows)
        model.lm_head.weight[follows] = rows
        own = head.layers[0]
        for norm in (model.model.norm, own.enorm, own.hnorm, own.post_norm):
            norm.weight.fill_(1)
        own.eh_proj.weight.copy_(torch.cat([torch.zeros(size, size), rows[follows].T @ rows], 1))
    return model, head
