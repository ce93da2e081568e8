"""Tiny random models whose sizes Ascend's operators take: heads of 128 dims, MLA of 512 + 64 over 16 heads."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models

_HIDDEN, _HEAD = 512, 128
_LENGTHS = frozenset(
    "local_attention attention_chunk_size index_topk n_ctx max_seq_len context_length model_max_length seq_length "
    "max_sequence_length max_seq_length".split()
)
"""Names of windows, chunks, and numbers of chosen keys and of positions, that say neither "window" nor "position"."""
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_GROUPED = {name: _HEAD for name, size in tiny_models.SIZES.items() if size == 16 and "head" in name}
_WIDE = {name: _HIDDEN for name, size in tiny_models.SIZES.items() if size == 64 and name != "max_source_positions"}
_INDEXER = {"index_n_heads": 16}
_SIZES = {
    **{**tiny_models.SIZES, **_WIDE, **_GROUPED, **_LATENT, **_INDEXER},
    **{"rotary_dim": 64, "global_head_dim": _HEAD},
}
_STATE_MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": _HEAD},
    "bamba": {"mamba_n_heads": 8},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "zamba": {"attention_hidden_size": 2 * _HIDDEN, "attention_head_dim": 2 * _HEAD},
}
"""Sizes that depend on others, and layers that keep state."""
_LATENT_MODELS = {
    **_SIZES,
    **dict.fromkeys(_WIDE, 1024),
    **{name: 16 for name, size in tiny_models.SIZES.items() if size == 4 and "attention_heads" in name},
}


def build_legal_model(
    model_type: str, *, dtype: torch.dtype = torch.float32, window: int = tiny_models.WINDOW, **overrides: Any
) -> PreTrainedModel:
    """As ``tiny_models.build_tiny_model``, with sizes that the limits of the NPU operators allow, and windows, chunks
    and choices of keys of so many tokens wherever the architecture has any."""
    default = CONFIG_MAPPING[model_type]()
    overrides = {**_STATE_MODELS.get(model_type, {}), **overrides}
    latent = getattr(default, "kv_lora_rank", None) is not None
    positions = max(tiny_models.MAX_POSITIONS, 2 * window)
    own = {tiny_models.WINDOW: window, tiny_models.MAX_POSITIONS: positions}
    names = {name for name in tiny_models.SIZES if "window" in name or "position" in name or name in _LENGTHS}
    sizes = {
        name: own.get(size, size) if name in names else size
        for name, size in (_LATENT_MODELS if latent else _SIZES).items()
    }
    rope = overrides.get("rope_parameters", {})
    factors = {
        name: rope[name] * (_HEAD // 2 // len(rope[name]))
        for name in rope
        if name.endswith("_factor") and isinstance(rope[name], list)
    }
    if factors:  # one for each pair of dims
        overrides["rope_parameters"] = {**rope, **factors}
    with mock.patch.object(tiny_models, "SIZES", sizes):
        return tiny_models.build_tiny_model(model_type, dtype=dtype, **overrides)
