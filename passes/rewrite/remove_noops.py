"""Remove operators that return what they were given.

Matches:
    clone(x), slice(x, d, 0, end), expand(x, same), view(x, same), _to_copy(x, same dtype), mul(x, 1), div(x, 1),
    cat([x]), alias(x), detach(x)          # where x and the result have one dtype, shape and strides
Becomes:
    x
Why it is faster:
    dropout that is off, `contiguous()` of what is contiguous and scales of one each cost a pass over the activations,
    or hide a chain from the passes that look for it.

Level 1: bitwise equal.
"""

from __future__ import annotations

from torch import fx

from ..graph.data_movement import COPIES, RESHAPES
from ..graph.fx_nodes import callee, value
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph

_COPIES = COPIES | RESHAPES | {"slice.Tensor", "expand", "_to_copy", "lift_fresh_copy", "contiguous"}


def remove_noops(traced: TracedGraph) -> PassRecord:
    """Let the users of every no-op read its input. A result of the graph that is a copy of an input stays one."""
    results = set(traced.output.all_input_nodes)

    def step(node: fx.Node) -> str | None:
        source = _passed_on(node)
        if source is None or not _alike(node, source) or (node in results and source.op == "placeholder"):
            return None
        node.replace_all_uses_with(source)
        traced.graph.erase_node(node)
        return ""

    return rewrite_each(traced, "remove_noops", step)


def _passed_on(node: fx.Node) -> fx.Node | None:
    """The argument whose elements ``node`` returns unchanged, if its dtype, shape and strides are."""
    name = callee(node)
    if name in _COPIES:
        source = node.args[0]
    elif name in ("mul.Tensor", "div.Tensor", "mul.Scalar", "div.Scalar") and not isinstance(node.args[1], fx.Node):
        source = node.args[0] if node.args[1] == 1 else None
    elif name == "cat":
        tensors = node.args[0]
        source = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else None  # type: ignore[assignment]
    else:
        source = None
    return source if isinstance(source, fx.Node) else None


def _alike(node: fx.Node, source: fx.Node) -> bool:
    a, b = value(node), value(source)
    if a.dtype != b.dtype or a.device != b.device or len(a.shape) != len(b.shape):
        return False
    return all(str(s) == str(t) for s, t in zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True))
