"""The compiler. Names of ``public`` are imported on first use, so that ``choices`` can be imported without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(import_module(".public", __name__), name)
