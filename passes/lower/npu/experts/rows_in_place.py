"""A check that nothing reads rows again that the product of int8 by 4 bits has changed.

Source: op-plugin, test_npu_grouped_matmul.py, A8W4 tests: "A8W4 will inplace change the value of x". Its schema is
functional, so that neither torch nor the graph engine knows.
"""

from __future__ import annotations

import torch
from torch import fx

from ....graph.fx_nodes import storage_key, value
from ....graph.traced import TracedGraph


def check_rows_read_once(traced: TracedGraph) -> None:
    """Raise ``ValueError`` if rows of such a product are an input of the graph, or have another reader."""
    nodes = list(traced.graph.nodes)
    for node in nodes:
        if node.target is not torch.ops.npu.npu_grouped_matmul.default:
            continue
        (rows,), (weight,) = node.args[:2]  # type: ignore[misc]
        if value(rows).dtype is not torch.int8 or value(weight).dtype is not torch.int32:
            continue
        key = storage_key(rows)
        same = [other for other in nodes if storage_key(other) == key]
        readers: set[fx.Node] = {user for other in same for user in other.users} - {*same}
        if readers != {node} or any(other.op == "placeholder" for other in same):
            others = ", ".join(sorted(other.name for other in readers - {node})) or "the caller"
            raise ValueError(f"{node.name} changes its rows {rows} in place, and {others} reads them, too: copy them")
