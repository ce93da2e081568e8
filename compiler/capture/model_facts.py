"""Facts about a model that need no run."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def takes_positions(model: nn.Module) -> bool:
    """True if the model's forward names ``position_ids``."""
    return "position_ids" in inspect.signature(model.forward).parameters


def takes_hidden(model: nn.Module) -> bool:
    """True if the model's forward names ``previous_hidden``: a row for each token, as a head for further tokens reads
    them (``torch_pagoda.checkpoint.mtp_head``)."""
    return "previous_hidden" in inspect.signature(model.forward).parameters


def max_positions(model: nn.Module) -> int | None:
    """The model's maximum number of positions, or None when its config does not say."""
    for config in configs(model):
        for name in (
            "max_position_embeddings",
            "n_positions",
            "max_sequence_length",
            "max_seq_len",
            "seq_length",
        ):
            size = getattr(config, name, None)
            if isinstance(size, int) and size > 0:
                return size
    return None


def configs(model: nn.Module) -> list[Any]:
    """The configs that say what a model's decoder is like, the innermost first."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return [text] if text is config else [text, config]
