"""The check that what passes recorded of a graph's values is what its operators yield."""

from __future__ import annotations

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import VMAP_BOUNDS, callee, is_tensor, value


def propagate(traced: TracedGraph) -> None:
    """Recompute every fake value from the placeholders and compare it with what the passes recorded.

    A view that new strides do not allow becomes a reshape, which copies.
    Nodes between the begin and the end of a vmap keep their values: they cannot be run one at a time.
    """
    vmaps = 0
    for node in traced.graph.nodes:
        vmaps += VMAP_BOUNDS.get(callee(node), 0)
        if vmaps or node.op not in ("call_function", "call_method") or not is_tensor(node):
            continue
        recorded = value(node)
        traced.propagate_or_copy(node)
        found = value(node)
        if found.dtype != recorded.dtype or found.dim() != recorded.dim():
            raise ValueError(
                f"{node.name} is {found.dtype} of rank {found.dim()}, "
                f"recorded as {recorded.dtype} of rank {recorded.dim()}"
            )
