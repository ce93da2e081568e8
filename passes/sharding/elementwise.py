"""Rules for operators that work on each element by itself, and for linear layers whose outputs are cut."""

from __future__ import annotations

from torch import fx

from ..graph.cut import Cut, Refused
from ..graph.fx_nodes import callee, shape
from .walk import Rule, Walk

_BENDING = frozenset(
    "activation gated_activation exp log sigmoid silu softplus clamp where.self tanh relu gelu pow.Tensor_Scalar "
    "minimum maximum clamp_min clamp_max abs sqrt square log1p expm1".split()
)
"""Functions for which a layer is made; what lies between linears without one of them is no layer's middle."""
_OTHERS = frozenset(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar mul.Scalar neg gt.Scalar _to_copy clone rsub.Scalar copy "
    "lt.Scalar rsqrt ge.Scalar le.Scalar alias detach".split()
)


def _elementwise(walk: Walk, node: fx.Node, cut: Cut) -> None:
    walk.works |= callee(node) in _BENDING
    rank = len(shape(node))
    for source in node.all_input_nodes:
        sizes = shape(source)
        dim = cut.dim - (rank - len(sizes))
        if dim >= 0 and not (isinstance(sizes[dim], int) and sizes[dim] == 1):  # which is broadcast
            walk.demand(source, node, dim, cut.indices)


def _linear(walk: Walk, node: fx.Node, cut: Cut) -> None:
    if cut.dim != len(shape(node)) - 1:
        raise Refused("a linear layer is cut along its rows")
    walk.opened = True
    for parameter in node.args[1:]:
        walk.demand(parameter, node, 0, cut.indices)


ELEMENTWISE: dict[str, Rule] = {**dict.fromkeys((*_BENDING, *_OTHERS), _elementwise), "linear": _linear}
