"""Notes on nodes that retracing a graph copies to the new nodes: ``node.meta["custom"]``.

Copies of a graph share the dictionaries, so a change makes a new one.
"""

from __future__ import annotations

from typing import Any

from torch import fx


def custom_note(node: fx.Node, key: str) -> Any:
    """What stands on ``node`` under ``key``; None where nothing does."""
    return (node.meta.get("custom") or {}).get(key)


def put_custom_note(node: fx.Node, key: str, note: Any) -> None:
    """Store ``note`` on ``node`` under ``key``, replacing any earlier note."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: note}


def clear_custom_notes(graph: fx.Graph, key: str) -> None:
    """Take what stands under ``key`` off every node of ``graph``."""
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        if key in custom:
            node.meta["custom"] = {name: note for name, note in custom.items() if name != key}
