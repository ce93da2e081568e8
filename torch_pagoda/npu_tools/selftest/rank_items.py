"""What the ranks stage does. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BROKEN", "KINDS", "WAYS"]

KINDS = ("all_reduce", "all_gather", "broadcast")
"""Exchanges of the ranks."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "operators one by one": {"codegen": "none"},
    "graph engine": {"codegen": "ge"},
    "static decode graphs": {"codegen": "ge", "static_decode": True},
    "captured graphs": {"codegen": "aclgraph"},
}
"""Name of an item → options of the engine that serves the model."""
BROKEN = "a rank that is killed"
"""The last item."""
