"""Recognize activations of one input.

Matches:
    silu(x), gelu(x), relu(x), sigmoid(x); relu(x) ** 2; x * sigmoid(x); x * sigmoid(1.702 * x);
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) and every other spelling of these
Becomes:
    pagoda::activation(x, kind)
Why it is faster:
    a written-out GELU is eight passes over the widest activations of the model; and products with it become gated
    activations.

Level 2. Written-out forms are recognized by running them on a grid that reaches beyond their constants, so
their spelling does not matter. In half precision they are computed in float32 and rounded once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ...runtime.ops.gated_activation import activation_reference
from ..graph.fx_nodes import callee, is_tensor, numbers, shape, value
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph

ACTIVATION = torch.ops.pagoda.activation.default

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "quick_gelu")
_ANCHORS = frozenset("tanh sigmoid erf relu silu gelu".split())
_POINTWISE = frozenset(
    "mul.Tensor add.Tensor sub.Tensor div.Tensor pow.Tensor_Scalar tanh sigmoid erf relu silu gelu neg exp square "
    "_to_copy reciprocal mul.Scalar add.Scalar rsub.Scalar rsub.Tensor".split()
)
_DEEPEST = 6
_TOLERANCE = 2e-5
_NEAR = 8
"""Numbers up to here are the usual ones; beyond, the tolerance grows with them."""
_LEAST_BITS, _MOST_BITS = 10, 100
"""Of the largest number to compare at: one that every constant of a function, or a product of them, is reached by."""


def recognize_activation(traced: TracedGraph) -> PassRecord:
    """Replace every known activation by ``pagoda::activation``."""

    def step(node: fx.Node) -> str | None:
        if callee(node) not in _ANCHORS or not node.users or not value(node).is_floating_point():
            return None
        found = _largest_known(node)
        if found is None:
            if not _is_projection(node.args[0]):
                return None
            return f"a function around {callee(node)} other than {', '.join(KINDS)}"
        x, output, kind = found
        with traced.before(output):
            new = traced.call(ACTIVATION, x, kind)
        traced.substitute(output, new)
        return ""

    return rewrite_each(traced, "recognize_activation", step)


def _largest_known(anchor: fx.Node) -> tuple[fx.Node, fx.Node, str] | None:
    """The input, the output and the kind of the largest known function of one tensor that goes through ``anchor``."""
    for x in _inputs(anchor):
        outputs = list(_outputs(anchor, x))
        for output in reversed(outputs):
            if value(output).dtype != value(x).dtype or str(shape(output)) != str(shape(x)):
                continue
            kind = _kind(x, output)
            if kind:
                return x, output, kind
    return None


def _inputs(anchor: fx.Node) -> Iterator[fx.Node]:
    """Tensors that may be the function's input, farthest first: the larger function is tried before its parts."""
    found: list[fx.Node] = []
    pending = [(n, 1) for n in anchor.all_input_nodes]
    while pending:
        node, depth = pending.pop(0)
        if not is_tensor(node) or node in found:
            continue
        found.append(node)
        if callee(node) in _POINTWISE and depth < _DEEPEST:
            pending += [(n, depth + 1) for n in node.all_input_nodes]
    yield from reversed(found)


def _outputs(anchor: fx.Node, x: fx.Node) -> Iterator[fx.Node]:
    """``anchor`` and the pointwise nodes below it, each a function of ``x`` alone that nothing else reads into."""
    if not _is_function_of(anchor, x):
        return
    node = anchor
    yield node
    for _ in range(_DEEPEST):
        users = [u for u in node.users if callee(u) in _POINTWISE and _is_function_of(u, x)]
        if len(node.users) != 1 or len(users) != 1:
            return
        node = users[0]
        yield node


def _is_function_of(node: fx.Node, x: fx.Node) -> bool:
    """Tell whether ``node`` is computed from ``x`` and numbers by pointwise operators."""
    return bool(_between(x, node))


def _between(x: fx.Node, output: fx.Node) -> list[fx.Node]:
    """The pointwise operators that make ``output`` of ``x`` and numbers; none where others are needed."""
    pending, found = [output], list[fx.Node]()
    reached = False
    while pending:
        node = pending.pop()
        if node is x or node in found:
            reached = reached or node is x
            continue
        if callee(node) not in _POINTWISE or len(found) > 30:
            return []
        found.append(node)
        pending += node.all_input_nodes
    return found if reached else []


def _kind(x: fx.Node, output: fx.Node) -> str:
    """The known function that ``output`` is of ``x``, or ""."""
    constants = [c for node in _between(x, output) for c in numbers(node)]
    bits = _LEAST_BITS + sum(abs(math.log2(abs(c))) for c in constants)
    grid, known = _known(min(math.ceil(bits), _MOST_BITS))
    results: dict[fx.Node, Any] = {x: grid}

    def run(node: fx.Node) -> Any:
        if node not in results:
            args, kwargs = fx.map_arg((node.args, node.kwargs), run)
            if "dtype" in kwargs:
                kwargs = {**kwargs, "dtype": torch.float64}
            results[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return results[node]

    found = run(output)
    tolerance = _TOLERANCE * (grid.abs() / _NEAR).clamp(min=1)
    for kind, expected in known:
        if bool(((found - expected).abs() < tolerance).all()):
            return kind
    return ""


@functools.cache
def _known(bits: int) -> tuple[torch.Tensor, tuple[tuple[str, torch.Tensor], ...]]:
    """Numbers up to ``2 ** bits`` of both signs, and what the known functions make of them."""
    far = torch.arange(math.log2(_NEAR), bits + 0.5, 0.5, dtype=torch.float64).exp2()
    grid = torch.cat((-far, torch.linspace(-_NEAR, _NEAR, 257, dtype=torch.float64), far))
    return grid, tuple((kind, activation_reference(grid, kind)) for kind in KINDS)


def _is_projection(node: object) -> bool:
    while callee(node) in ("view", "_unsafe_view", "add.Tensor"):
        node = node.args[0]  # type: ignore[attr-defined]
    return callee(node) in ("linear", "mm", "addmm")
