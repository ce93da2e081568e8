"""A checkpoint of a single module, written and read as one of a whole model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from torch_pagoda.checkpoint.quantized import quantization_method
from torch_pagoda.checkpoint.quantized_tensors import read_quantized
from torch_pagoda.checkpoint.stored_tensors import of_files

MODULE = "model.layers.0.self_attn.q_proj"


def read_module(folder: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What is read of it, by the last part of the names.

    Args:
        folder: for its file.
        tensors: of ``MODULE``, by the last part of their names.
        settings: the config's ``quantization_config``, or msModelSlim's description, which names ``MODULE``.

    Raises:
        ValueError: it is refused.
    """
    file = folder / "model.safetensors"
    save_file({f"{MODULE}.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}, file)
    if f"{MODULE}.weight" in settings:
        (folder / "quant_model_description.json").write_text(json.dumps(settings))
    method = quantization_method({"quantization_config": settings}, str(folder))
    assert method is not None
    read = read_quantized(str(folder), method, [str(file)], of_files([str(file)]), torch.float32)
    return {key.removeprefix(f"{MODULE}."): weight for key, weight in read}
