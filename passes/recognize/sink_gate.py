"""Sinks that a model applies behind its attention, as a gate made of the logarithm of the softmax's denominator.

``sigmoid(logsumexp(s) - sink)`` is ``sum(exp(s)) / (sum(exp(s)) + exp(sink))``, so ``softmax(s) @ v`` times it is the
attention with one more logit per head that has no value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.data_movement import CAST_CALLS
from ..graph.evaluate import DependsOnData, Evaluation
from ..graph.fx_nodes import METADATA_CALLS, argument, callee, is_tensor, shape, value
from ..graph.record import NoMatch
from ..graph.traced import TracedGraph

_TOKENS = 7
_PRODUCTS = ("mul", "mul_", "imul", "multiply")


@dataclass(frozen=True)
class SinkGate:
    """The gate of one attention.

    Attributes:
        sinks: input with one entry per head.
        result: the gated result, which attention with these sinks gives.
        nodes: those from the scores to the gate.
    """

    sinks: fx.Node
    result: fx.Node
    nodes: frozenset[fx.Node]


def find_sink_gate(traced: TracedGraph, scores: fx.Node, out: fx.Node) -> SinkGate | None:
    """The gate on ``out``, the product of the probabilities and v, that is made of ``scores``; None without one.

    Args:
        traced: the graph.
        scores: what the softmax reads, ``[1, H, T, T]``.
        out: ``[1, H, T, Dv]``.

    Raises:
        NoMatch: the logarithm is taken, and what is done with it is not a gate by sinks.
    """
    while callee(scores) in CAST_CALLS:
        scores = scores.args[0]  # type: ignore[assignment]
    logarithm = next((user for user in _uncast(scores) if callee(user) == "logsumexp"), None)
    if logarithm is None:
        return None
    if argument(logarithm, 1, "dim") not in (-1, [-1], (-1,)):
        raise NoMatch(f"{logarithm.name} does not run over the keys")
    result = _only_user(out)
    if callee(result) not in _PRODUCTS or len(result.args) != 2:
        raise NoMatch(f"{scores.name} is also read by {logarithm.name}, which gates no result of the attention")
    gate = result.args[0] if result.args[1] is out else result.args[1]
    nodes, sinks = _between(logarithm, gate)
    heads = int(shape(out)[1])
    if shape(sinks) != (heads,):
        raise NoMatch(f"{sinks.name} has shape {tuple(shape(sinks))}, not one sink for each of the {heads} heads")
    if not _is_gate(traced, logarithm, sinks, gate):
        raise NoMatch(f"{gate.name} does not turn {logarithm.name} into a gate by sinks")
    cast = logarithm.args[0]
    while isinstance(cast, fx.Node) and cast is not scores:
        nodes.add(cast)
        cast = cast.args[0]
    outside = [user for node in nodes for user in _readers(node) if user not in nodes and user is not result]
    if outside:
        raise NoMatch(f"{logarithm.name} of the scores is also read by {outside[0].name}")
    return SinkGate(sinks, result, frozenset(nodes))


def _uncast(node: fx.Node) -> Iterable[fx.Node]:
    """The users of a node, and of casts of it."""
    for user in node.users:
        yield user
        if callee(user) in CAST_CALLS:
            yield from _uncast(user)


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if callee(user) not in METADATA_CALLS]


def _only_user(node: fx.Node) -> fx.Node:
    users = _readers(node)
    if len(users) != 1:
        raise NoMatch(f"{node.name} is read {len(users)} times")
    return users[0]


def _between(first: fx.Node, last: Any) -> tuple[set[fx.Node], fx.Node]:
    """The nodes from ``first`` to ``last``, and the one graph input that they read beside it."""
    nodes: set[fx.Node] = {first}
    inputs: set[fx.Node] = set()
    pending = [last]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node in nodes:
            continue
        if node.op == "placeholder" and is_tensor(node):
            inputs.add(node)
            continue
        nodes.add(node)
        if len(nodes) > 16:
            raise NoMatch(f"{first.name} of the scores is far from the result")
        first_read = 1 if callee(node) in METADATA_CALLS else 0
        pending += node.all_input_nodes[first_read:]
    if len(inputs) != 1:
        raise NoMatch(f"{len(inputs)} inputs beside {first.name} make the gate")
    return nodes, inputs.pop()


def _is_gate(traced: TracedGraph, logarithm: fx.Node, sinks: fx.Node, gate: fx.Node) -> bool:
    """Whether the gate is ``sigmoid(logarithm - sink)`` of each head, by running it on numbers."""
    heads = int(shape(sinks)[0])
    kept = (1,) * (len(shape(logarithm)) - 3)
    generator = torch.Generator().manual_seed(0)
    given = {
        logarithm: 3 * torch.randn(1, heads, _TOKENS, *kept, generator=generator).to(value(logarithm).dtype),
        sinks: 3 * torch.randn(heads, generator=generator).to(value(sinks).dtype),
    }
    try:
        seen = Evaluation(traced, {traced.token_symbol: _TOKENS}, given=given)(gate)
    except (DependsOnData, RuntimeError, TypeError, ValueError):
        return False
    logarithms = given[logarithm].float().reshape(1, heads, _TOKENS, 1)
    expected = torch.sigmoid(logarithms - given[sinks].float()[:, None, None])
    tolerance = 4 * torch.finfo(value(gate).dtype).eps
    return seen.shape == expected.shape and bool(torch.allclose(seen.float(), expected, atol=tolerance, rtol=0))
