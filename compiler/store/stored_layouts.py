"""oneDNN's layouts as plain data, kept with a program whose weights were packed in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...runtime.ops.onednn_weight import Layout, Shape, known_layouts, onednn_settings, tell_layouts
from .typed_data import from_plain, to_plain


@dataclass(frozen=True)
class StoredLayouts:
    """What a file holds of them.

    Attributes:
        settings: see ``onednn_settings``.
        layouts: see ``known_layouts``.
    """

    settings: dict[str, str]
    layouts: dict[Shape, Layout]


def layouts_data() -> dict[str, Any]:
    """The layouts that this process knows."""
    plain: dict[str, Any] = to_plain(StoredLayouts(onednn_settings(), known_layouts()))
    return plain


def tell_stored_layouts(data: Any) -> None:
    """Let weights be laid out as ``layouts_data`` says, where oneDNN is set as it was.

    Raises:
        ValueError: the data is none of layouts.
    """
    stored: StoredLayouts = from_plain(StoredLayouts, data, "the layouts")
    if stored.settings == onednn_settings():
        tell_layouts(stored.layouts)
