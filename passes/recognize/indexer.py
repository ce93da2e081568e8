"""The scorer behind a selection of keys: found by its operands, and identified by running it on numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.data_movement import CAST_CALLS, REARRANGING_CALLS
from ..graph.evaluate import DependsOnData, Evaluation, at_sizes
from ..graph.fx_nodes import argument, callee, closure, is_tensor, shape, value
from ..graph.record import NoMatch
from ..graph.token_dims import token_dims
from ..graph.traced import TracedGraph

_TOKENS = 9
_MOST_NODES = 32
_HIDDEN = -1e30  # what hides a key from the choice has to be below any score
_FAILURES = (DependsOnData, RuntimeError, TypeError, ValueError, IndexError)


@dataclass(frozen=True)
class Indexer:
    """``sum over h of weights[i, h] · relu(scale · query[i, h] · key[j])`` of every token i and key j <= i.

    Attributes:
        query: node of ``H · D`` numbers per token.
        key: of D numbers.
        weights: of H numbers.
        heads: H.
        dim: D.
        topk: the most keys that are chosen.
        scale: a positive number.
        topk_size: the node that says how many are chosen of T.
    """

    query: fx.Node
    key: fx.Node
    weights: fx.Node
    heads: int
    dim: int
    topk: int
    scale: float
    topk_size: fx.Node


def find_indexer(traced: TracedGraph, choice: fx.Node) -> Indexer:
    """The scorer of which ``choice``, the indices of a top-k, takes the best.

    Raises:
        NoMatch: it is not one.
    """
    topk: Any = choice.args[0]
    topk_size, count = _count(traced, topk)
    if argument(topk, 2, "dim", -1) not in (-1, len(shape(topk.args[0])) - 1):
        raise NoMatch("the best are not chosen among the keys")
    if argument(topk, 3, "largest", True) is not True:
        raise NoMatch("the lowest scores are chosen")
    scores = _unmasked(traced, topk.args[0])
    leaves = _operands(traced, scores)
    if len(leaves) != 3:
        raise NoMatch(f"{len(leaves)} tensors make the scores of the keys, not a query, a key and weights")
    for query, key, weights in itertools.permutations(leaves):
        sizes = _sizes(traced, query, key, weights)
        if sizes is not None:
            scale = _scale(traced, scores, (query, key, weights), sizes)
            if scale is not None:
                return Indexer(query, key, weights, *sizes, count, scale, topk_size)
    raise NoMatch("the scores of the keys are not a weighted sum of relu(q·k) over heads")


def insert_per_token(traced: TracedGraph, node: fx.Node, *sizes: int) -> fx.Node:
    """``node`` as ``[1, T, *sizes]``, at the graph's insertion point."""
    (tokens,) = token_dims(traced, node)
    if not _is_behind_unit_dims(node, tokens):
        node = traced.method("movedim", node, tokens, 0)
    if len(shape(node)) == 2 + len(sizes) and shape(node)[0] == 1 and tuple(shape(node)[2:]) == sizes:
        return node
    return traced.method("reshape", node, 1, -1, *sizes)


def _count(traced: TracedGraph, topk: fx.Node) -> tuple[fx.Node, int]:
    """How many are chosen: the node of it, which is ``min(K, T)``, and K."""
    size = argument(topk, 1, "k")
    number = value(size)
    if not isinstance(size, fx.Node) or not isinstance(number, torch.SymInt):
        raise NoMatch(f"the number of chosen keys, {size}, is fixed for any context")

    def at(tokens: int) -> int:
        return int(at_sizes(number, {traced.token_symbol: tokens}))

    count = at(1 << 40)
    if not 0 < count < 1 << 30 or any(at(n) != min(n, count) for n in (1, 2, count, count + 1, 2 * count)):
        raise NoMatch(f"the number of chosen keys, {size.name}, is not the minimum of a constant and the tokens")
    return size, count


def _unmasked(traced: TracedGraph, masked: Any) -> fx.Node:
    """The scores, of which the choice reads those of keys that lie behind no later token."""
    for _ in range(4):
        if callee(masked) in CAST_CALLS and isinstance(masked, fx.Node):
            masked = masked.args[0]
    if not isinstance(masked, fx.Node):
        raise NoMatch("the scores of the keys are not a tensor")
    found = [n for n in masked.all_input_nodes if is_tensor(n) and value(n).is_floating_point()]
    for scores in found:
        if len(token_dims(traced, scores)) == 2 and _hides_later_keys(traced, scores, masked):
            return scores
    raise NoMatch(f"{masked.name} does not hide just the later keys from the choice")


def _hides_later_keys(traced: TracedGraph, scores: fx.Node, masked: fx.Node) -> bool:
    generator = torch.Generator().manual_seed(0)
    sizes = {traced.token_symbol: _TOKENS}
    given = torch.randn(at_sizes(tuple(shape(scores)), sizes), generator=generator).to(value(scores).dtype)
    evaluation = Evaluation(traced, sizes, given={scores: given})
    try:
        seen = evaluation(masked)
    except _FAILURES:
        return False
    if seen.shape != given.shape or tuple(seen.shape[-2:]) != (_TOKENS, _TOKENS):
        return False
    causal = torch.ones(_TOKENS, _TOKENS).tril().bool().expand(seen.shape)
    if not torch.equal(seen[causal], given[causal]) or not bool((seen[~causal] <= _HIDDEN).all()):
        return False
    traced.notes.fold(evaluation.sources(masked))
    return True


def _operands(traced: TracedGraph, scores: fx.Node) -> list[fx.Node]:
    """The tensors with one row per token that the scores of tokens and keys are made of, each as it was first."""
    leaves: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    pending = [scores]
    while pending:
        node = pending.pop()
        if node in seen or not is_tensor(node):
            continue
        seen.add(node)
        if len(seen) > _MOST_NODES:
            raise NoMatch("the scores of the keys are too complex")
        if len(token_dims(traced, node)) >= 2:
            pending += node.all_input_nodes
        else:
            leaves[_first_form(traced, node)] = None
    return list(leaves)


def _first_form(traced: TracedGraph, node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, or the same numbers in a wider dtype."""
    while callee(node) in REARRANGING_CALLS | CAST_CALLS | {"contiguous"} and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if not is_tensor(source) or len(token_dims(traced, source)) != 1:
            break
        wide = torch.promote_types(value(source).dtype, value(node).dtype)
        if wide is not value(node).dtype or value(source).numel() != value(node).numel():
            break
        node = source
    return node


def _row(traced: TracedGraph, node: fx.Node) -> tuple[int, ...] | None:
    """The sizes of one token's part, without those of one; None unless there is just one dim of tokens."""
    dims = token_dims(traced, node)
    if len(dims) != 1 or shape(node)[dims[0]].node.expr != traced.token_symbol:
        return None
    return tuple(int(size) for i, size in enumerate(shape(node)) if i != dims[0] and size != 1)


def _sizes(traced: TracedGraph, query: fx.Node, key: fx.Node, weights: fx.Node) -> tuple[int, int] | None:
    """H and D, where the three can be what their names say."""
    rows = [_row(traced, node) for node in (query, key, weights)]
    if any(row is None for row in rows) or not all(value(n).is_floating_point() for n in (query, key, weights)):
        return None
    of_query, of_key, of_weights = rows
    if len(of_key or ()) != 1 or len(of_weights or ()) > 1:
        return None
    (dim,) = of_key or ()
    heads = of_weights[0] if of_weights else 1
    return (heads, dim) if math.prod(of_query or ()) == heads * dim else None


def _scale(
    traced: TracedGraph, scores: fx.Node, operands: tuple[fx.Node, ...], sizes: tuple[int, int]
) -> float | None:
    """The factor of q·k with which the formula gives the scores; None if none does."""
    heads, dim = sizes
    generator = torch.Generator().manual_seed(0)
    tokens = {traced.token_symbol: _TOKENS}
    given, rows = {}, []
    for node, row in zip(operands, ((heads, dim), (dim,), (heads,)), strict=True):
        at = at_sizes(tuple(shape(node)), tokens)
        given[node] = torch.randn(at, generator=generator).to(value(node).dtype)
        (place,) = token_dims(traced, node)
        rows.append(given[node].movedim(place, 0).reshape(_TOKENS, *row).double())
    query, key, weights = rows
    expected = (torch.relu(torch.einsum("ihd,jd->ijh", query, key)) * weights[:, None]).sum(-1)
    evaluation = Evaluation(traced, tokens, given=given)
    try:
        found = evaluation(scores).double()
    except _FAILURES:
        return None
    if found.numel() != expected.numel() or tuple(found.shape[-2:]) != (_TOKENS, _TOKENS):
        return None
    found = found.reshape(_TOKENS, _TOKENS)
    scale = _written(scores, float((found * expected).sum() / expected.square().sum()))
    if not scale > 0 or not torch.allclose(found, scale * expected, rtol=1e-5, atol=1e-5 * float(found.abs().max())):
        return None
    traced.notes.fold(evaluation.sources(scores))
    return scale


def _written(scores: fx.Node, scale: float) -> float:
    """``scale`` as the graph writes it, where it is one of its constants or a product of two."""
    written = {x for n in closure(scores) for x in (*n.args, *n.kwargs.values()) if isinstance(x, float) and x > 0}
    products = {a * b for a in written for b in written} | written | {1.0}
    nearest = min(products, key=lambda x: abs(x - scale))
    return nearest if abs(nearest - scale) < 1e-6 * scale else scale


def _is_behind_unit_dims(node: fx.Node, tokens: int) -> bool:
    return all(size == 1 for size in shape(node)[:tokens])


def choices(traced: TracedGraph, mask: fx.Node) -> Iterator[fx.Node]:
    """The indices of a top-k that a mask is made of, each once."""
    seen: set[fx.Node] = set()
    pending = [mask]
    while pending:
        node = pending.pop()
        if node in seen or not is_tensor(node):
            continue
        seen.add(node)
        if is_choice(node):
            yield node
        elif len(token_dims(traced, node)) >= 2 or value(node).dtype in (torch.int32, torch.int64):
            pending += node.all_input_nodes


def is_choice(node: fx.Node) -> bool:
    """True for the indices of a top-k."""
    if callee(node) not in ("getitem", "getattr") or callee(node.args[0]) != "topk":
        return False
    return node.args[1] in (1, "indices")
