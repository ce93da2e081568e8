"""Recognize a bias that each query adds to its scores by the distance back to a key: Inkling.

Matches:
    bias = rel.gather(-1, clamp(i - j, 0, E - 1))                    # rel, [1, H, T, E], is computed from the tokens
    bias = masked_fill(bias, (i - j < 0) | (i - j >= E), 0) * tau[T, 1]
    pagoda::attention(q, k, v, mask=where(base, bias, lowest), ...)  # or base + bias; base is made of positions
Becomes:
    pagoda::attention(q, k, v, mask=base, ..., relative_bias=rel * tau[T, 1])
Why it is faster:
    no T×T bias of every head is stored, and none that later tokens would need: a query's row has all distances.

Which entry meets which key, and that nothing is added elsewhere, is found by running the mask on random rows.

Level 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ...runtime.ops.attention.relative_bias import scores_of_relative_bias
from ..graph.attention_node import AttentionCall, attention_nodes
from ..graph.data_movement import CAST_CALLS
from ..graph.evaluate import DependsOnData, Evaluation
from ..graph.fx_nodes import argument, callee, closure, is_dynamic, is_tensor, shape, value
from ..graph.record import NoMatch, PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.token_dims import token_dims
from ..graph.traced import TracedGraph

_HIDDEN = -1e4
_MOST_EXTENT = 30
"""Distances that are run as they are; more are run as if they were fewer."""
_FEWER = (7, 12)
_TOKENS = 40
_PRODUCTS = frozenset({"mul", "mul_", "imul", "multiply", "truediv", "div", "__mul__"})


def recognize_relative_bias(traced: TracedGraph) -> PassRecord:
    """Take the bias by distance out of every mask. Flat (paged) graphs only."""

    def step(node: fx.Node) -> str | None:
        call = AttentionCall.of(node)
        if call.attn_mask is None or call.relative_bias is not None:
            return None
        found = list(_gathers(traced, call.attn_mask))
        if not found:
            return None
        if len(found) > 1:
            raise NoMatch(f"{len(found)} gathers of rows by distance make its mask")
        rows: Any = found[0].args[0]
        scaled_by, base = _way(traced, found[0], call.attn_mask)
        heads = int(shape(call.query)[1])
        if int(shape(rows)[1]) != heads:
            raise NoMatch(f"a bias of {shape(rows)[1]} heads for {heads}")
        with traced.before(node, like=found[0]):
            bias = _scaled(traced, rows, scaled_by)
        _compare(traced, call.attn_mask, base, rows, bias)
        node.args = call.changed(attn_mask=base, relative_bias=bias).arguments()
        return ""

    return rewrite_each(traced, "recognize_relative_bias", step, attention_nodes(traced) if traced.paged else ())


def _gathers(traced: TracedGraph, mask: fx.Node) -> Iterator[fx.Node]:
    """What a mask of scores is made of that picks entries of rows of tokens, for every key."""
    for node in closure(mask, Evaluation(traced, {}).reads):
        if callee(node) != "gather" or len(token_dims(traced, node)) != 2:
            continue
        source = node.args[0]
        if token_dims(traced, source) != [2] or len(shape(source)) != 4 or is_dynamic(shape(source)[3]):
            continue
        if argument(node, 1, "dim") in (-1, 3):
            yield node


def _way(traced: TracedGraph, gather: fx.Node, mask: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The casts and products on the way from the gathered rows to where the mask of positions joins them, and that
    mask."""
    needed = set(closure(mask, Evaluation(traced, {}).reads))
    way: list[fx.Node] = []
    base: fx.Node | None = None
    node = gather
    while node is not mask:
        users = [user for user in node.users if user in needed]
        if len(users) != 1:
            raise NoMatch(f"{node.name} is read {len(users)} times on the way to the mask")
        before, node = node, users[0]
        others = [n for n in node.all_input_nodes if n is not before and is_tensor(n)]
        if callee(node) in CAST_CALLS:
            if base is None:
                way.append(node)
        elif callee(node) == "contiguous":
            pass
        elif base is not None:
            raise NoMatch(f"{node.name} changes the mask that the bias is part of")
        elif callee(node) in _PRODUCTS and all(shape(n)[-1:] in ((), (1,)) for n in others):
            way.append(node)
        elif callee(node) == "masked_fill" and node.args[0] is before:
            pass  # hides distances; seen when it is run
        elif callee(node) in ("where", "add", "__add__", "iadd") and len(others) == 1:
            base = others[0]
        else:
            raise NoMatch(f"{callee(node)} makes something else of the bias than a part of a mask")
    if base is None:
        raise NoMatch("no mask of positions joins the bias")
    return way, base


def _scaled(traced: TracedGraph, rows: fx.Node, way: list[fx.Node]) -> fx.Node:
    """The rows behind the casts and products that the gathered ones go through."""
    for node in way:
        source = _read_on_the_way(node, way)
        arguments = tuple(rows if a is source else a for a in node.args)
        if node.op == "call_method":
            rows = traced.method(str(node.target), *arguments, **node.kwargs)
        else:
            rows = traced.call(node.target, *arguments, **node.kwargs)  # type: ignore[arg-type]
    return rows


def _read_on_the_way(node: fx.Node, way: list[fx.Node]) -> Any:
    """Which argument of a node is the bias: the one with a key axis."""
    return next(a for a in node.args if isinstance(a, fx.Node) and len(shape(a)) == 4 and is_dynamic(shape(a)[3]))


def _compare(traced: TracedGraph, mask: fx.Node, base: fx.Node, rows: fx.Node, bias: fx.Node) -> None:
    """Raise ``NoMatch`` unless the mask is that of positions with the bias added to what is seen."""
    extent = int(shape(rows)[3])
    runs: list[tuple[int, dict[int, int]]]
    if extent <= _MOST_EXTENT:
        runs = [(extent, {})]
    else:  # as if there were fewer distances; what holds for two numbers of them follows the constant
        runs = [(fewer, {s * (extent + d): s * (fewer + d) for s in (1, -1) for d in (0, -1, 1)}) for fewer in _FEWER]
    for distances, substitute in runs:
        sizes = {traced.token_symbol: _TOKENS}
        drawn = torch.randn(*map(int, shape(rows)[:2]), _TOKENS, distances, generator=_generator())
        given = {rows: drawn.to(value(rows).dtype)}
        try:
            seen, joined = (
                Evaluation(traced, sizes, substitute=substitute, given=given)(node) for node in (base, mask)
            )
            entries = Evaluation(traced, sizes, substitute=substitute, given=given)(bias)
        except DependsOnData as reason:
            raise NoMatch(f"the mask beside the bias depends on the tokens ({reason})") from None
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise NoMatch(f"the mask cannot be run: {error}") from None
        expected = scores_of_relative_bias(entries, torch.arange(_TOKENS), _TOKENS, joined.dtype)
        if joined.shape != expected.shape:
            raise NoMatch(f"the mask has shape {tuple(joined.shape)}")
        if seen.dtype is not torch.bool:
            expected, seen = expected + seen, seen > _HIDDEN
        seen = seen.expand(joined.shape)
        tolerance = 8 * torch.finfo(joined.dtype).eps
        same = torch.isclose(joined, expected, rtol=tolerance, atol=tolerance) | ~seen
        if not bool(same.all()) or bool((joined[~seen] > _HIDDEN).any()):
            raise NoMatch("the bias is not one by the distance back to a key")
    evaluation = Evaluation(traced, {}, given={rows: None})
    read = evaluation.sources(bias)
    traced.notes.fold(name for name in evaluation.sources(mask) if name not in read)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
