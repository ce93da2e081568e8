"""Tiny checkpoints of which most layers stay in the files, as if a host's memory were full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torch_pagoda.checkpoint.configs import load_config
from torch_pagoda.checkpoint.layers_in_files import LayersInFiles, layers_to_leave
from torch_pagoda.checkpoint.loading import checkpoint_files, load_model, resolve_dtype, stored_in
from torch_pagoda.checkpoint.quantized import quantization_method
from torch_pagoda.compiler.warm_start.checkpoint_files import CheckpointFiles

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "gpt2": {"num_hidden_layers": 5},
    "qwen3_moe": {"num_hidden_layers": 6},
    "mixtral": {"num_hidden_layers": 5},
    "deepseek_v3": {"num_hidden_layers": 6},
    "gpt_oss": {"num_hidden_layers": 8, "layer_types": [SLIDING, FULL] * 4},
    "gemma3_text": {"num_hidden_layers": 11, "layer_types": ([SLIDING, SLIDING, FULL] * 4)[:11]},
    "qwen3_5_text": {"num_hidden_layers": 8, "layer_types": [LINEAR, FULL] * 4},
    "mamba": {"num_hidden_layers": 5},
}
"""Architecture → settings, with more layers than have to be compiled where one is worth to be spared."""


def left(folder: Path, dtype: str, whole: str = "") -> LayersInFiles | None:
    """The layers of a checkpoint that stay in the files."""
    _, config = load_config(folder, False)
    name = str(folder)
    _, stored = stored_in(name, config, quantization_method(config, name))
    return layers_to_leave(name, config, resolve_dtype(dtype), stored, checkpoint_files(folder, dtype), 1.0, whole)


def loaded_in_part(folder: Path, dtype: str) -> tuple[LayersInFiles, CheckpointFiles]:
    """A model whose layers stay in the files, loaded so far; and the files."""
    layers, files = left(folder, dtype), checkpoint_files(folder, dtype)
    assert layers is not None and files is not None
    load_model(folder, dtype, False, torch.device("cpu"), load_config(folder, False)[1], layers)
    return layers, files
