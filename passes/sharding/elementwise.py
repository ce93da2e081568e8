"""Rules for operators that work on each element by itself, and for linear layers whose outputs are cut."""

from __future__ import annotations

from torch import fx

from ..graph.cut import Cut, Refused
from ..graph.fx_nodes import callee, shape
from .walk import Rule, Walk

_ACTIVATIONS = frozenset({"activation", "gated_activation"})
_NAMES = frozenset(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor neg exp log sigmoid silu softplus clamp where.self gt.Scalar "
    "_to_copy clone tanh relu gelu rsub.Scalar pow.Tensor_Scalar copy lt.Scalar minimum maximum clamp_min clamp_max "
    "abs sqrt rsqrt square log1p ge.Scalar le.Scalar alias detach".split()
)


def _elementwise(walk: Walk, node: fx.Node, cut: Cut) -> None:
    walk.works |= callee(node) in _ACTIVATIONS
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


ELEMENTWISE: dict[str, Rule] = {**dict.fromkeys((*_NAMES, *_ACTIVATIONS), _elementwise), "linear": _linear}
