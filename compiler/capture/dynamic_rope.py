"""Replaces dynamic NTK scaling of rotary tables while a model is traced.

Frequencies change once a sequence exceeds ``max_position_embeddings``, the maximum of a program's sequences: all of
them read the plain table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_DYNAMIC = "dynamic"


@contextmanager
def plain_rope(model: nn.Module) -> Iterator[None]:
    """Have the model's rotary modules scale nothing for a while. One thread at a time may trace a model."""
    changed: list[tuple[Any, Any]] = []
    try:
        for module in model.modules():
            kind = getattr(module, "rope_type", None)
            if kind is not None and kind != (plain := _plain(kind)) and hasattr(module, "original_max_seq_len"):
                _take_back_growth(module, kind)
                changed.append((module, kind))
                module.rope_type = plain
        yield
    finally:
        for module, kind in changed:
            module.rope_type = kind


def rope_types(config: Any) -> list[str]:
    """The kinds of scaling that a config names, other than none."""
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    entries = [stated, *stated.values()] if isinstance(stated, dict) else []
    found = [entry.get("rope_type", entry.get("type")) for entry in entries if isinstance(entry, dict)]
    return [kind for kind in dict.fromkeys(found) if isinstance(kind, str) and kind != "default"]


def _plain(kind: Any) -> Any:
    """A module's kind of scaling, or that of each type of layer, without what depends on the length."""
    if isinstance(kind, dict):
        return {layer: _plain(inner) for layer, inner in kind.items()}
    return "default" if isinstance(kind, str) and _DYNAMIC in kind else kind


def _take_back_growth(module: Any, kind: Any) -> None:
    """Put the plain table back where a longer sequence has run, as the module does itself at the next short one."""
    layers = [f"{layer}_" for layer, inner in kind.items() if _DYNAMIC in inner] if isinstance(kind, dict) else [""]
    for prefix in layers:
        longest = getattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        if longest > module.original_max_seq_len:
            module.register_buffer(
                f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"), persistent=False
            )
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
