"""Stand-ins for npugraph_ex's operators of streams and events."""

from __future__ import annotations

from typing import Any

from torch import fx

from torch_pagoda.compiler.targets.npu.aclgraph.side_stream import StreamOperators


def enter(keys: Any, values: Any) -> None: ...


def leave() -> None: ...


def record(event: str, inside: bool) -> None: ...


def wait(event: str, inside: bool) -> None: ...


def keep(tensor: Any, label: str) -> None: ...


OPERATORS = StreamOperators(enter, leave, record, wait, keep, lambda name: None)


def text(graph: fx.Graph) -> list[str]:
    """The nodes of a graph, a line each."""
    return [str(node.format_node()) for node in graph.nodes]
