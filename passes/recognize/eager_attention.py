"""Recognize attention that a model computes by hand.

Matches (any subset of the optional steps, in any spelling of them):
    s = q @ k'.transpose(-1, -2)      # or bmm, or baddbmm that adds a bias
    s = s * a / b                     # scale
    s = tanh(s / c) * c               # softcap
    s = s + mask | where(mask, s, min) | s.masked_fill(mask, min)
    s = cat([s, sinks]);  s - s.max()
    p = softmax(s.float()).to(dtype)[..., :-1]
    out = dropout(p) @ v'
    out = out * sigmoid(logsumexp(s) - sinks)
Becomes:
    pagoda::attention(q, k, v, mask, sinks, ..., scale, softcap)    # k, v un-repeated; masks joined into one
Why it is faster:
    the [heads, tokens, tokens] scores are never stored, nor are repeated keys and values, and later passes can
    give the call a paged cache.

Level 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..graph.attention_node import insert_attention
from ..graph.data_movement import CAST_CALLS
from ..graph.evaluate import DependsOnData, Evaluation, is_size, small_sizes
from ..graph.fx_nodes import (
    METADATA_CALLS,
    argument,
    callee,
    is_tensor,
    shape,
    value,
)
from ..graph.head_layout import HeadLayout, find_layout, insert_layout
from ..graph.record import NoMatch, PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph
from .sink_gate import find_sink_gate

_MATMULS = ("matmul", "bmm", "baddbmm", "__matmul__")
_CASTS = CAST_CALLS | {"contiguous", "clone"}
_LEAST = -1e30  # no score is below
_AFTER_SOFTMAX = _CASTS | {"dropout", "getitem", "view", "reshape", "nan_to_num"}


@dataclass
class _Mask:
    node: fx.Node
    keep: bool | None  # True: bool mask of what to keep; False: of what to drop; None: added to the scores
    factor: float = 1.0


@dataclass
class _Scores:
    """The operands and settings that the chain from the matrix product to the softmax holds."""

    query: fx.Node
    key: fx.Node
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[_Mask] = field(default_factory=list)
    sinks: fx.Node | None = None
    nodes: list[fx.Node] = field(default_factory=list)


def recognize_eager_attention(traced: TracedGraph) -> PassRecord:
    """Replace every hand-written attention by ``pagoda::attention``."""

    def step(node: fx.Node) -> str | None:
        product = _product_with_values(node) if callee(node) == "softmax" else None
        if product is None:
            return None
        _replace(traced, node, *product)
        return ""

    return rewrite_each(traced, "recognize_eager_attention", step)


def _product_with_values(softmax: fx.Node) -> tuple[fx.Node, list[fx.Node], bool] | None:
    """The product of the probabilities with v, the nodes on the way, and whether a sink column was cut off."""
    node, way, sliced = softmax, [softmax], False
    for _ in range(8):
        users = [u for u in node.users if callee(u) not in METADATA_CALLS]
        for user in users:
            if callee(user) in _MATMULS and user.args[0] is node and len(user.args) > 1:
                return user, way, sliced
        following = [u for u in users if callee(u) in _AFTER_SOFTMAX and u.args and u.args[0] is node]
        if not following:
            return None
        if callee(following[0]) == "getitem":
            sliced = True
        node = following[0]
        way.append(node)
    return None


def _replace(traced: TracedGraph, softmax: fx.Node, out: fx.Node, way: list[fx.Node], sliced: bool) -> None:
    dim = argument(softmax, 1, "dim")
    if dim not in (-1, len(shape(softmax)) - 1):
        raise NoMatch(f"softmax over dim {dim}, not over the keys")
    for node in way:
        if callee(node) == "dropout" and argument(node, 1, "p", 0.5) and argument(node, 2, "training", True):
            raise NoMatch("dropout is active")
        if callee(node) == "getitem" and not _drops_last(node.args[1]):
            raise NoMatch("the probabilities are indexed")
    scores = _read_scores(traced, softmax.args[0])
    if sliced != (scores.sinks is not None):
        raise NoMatch("a column of the probabilities is cut off, but no sink was appended")
    product = out
    inside = {*way, *scores.nodes, product}
    gate = find_sink_gate(traced, scores.nodes[0], product)
    if gate is not None:
        if scores.sinks is not None:
            raise NoMatch("the result is gated by sinks, and a sink was appended")
        scores.sinks, out = gate.sinks, gate.result
        inside |= gate.nodes
    for node in (*way, *scores.nodes):
        for user in node.users:
            if user not in inside and callee(user) not in METADATA_CALLS and not _only_feeds_maximum(user, inside):
                raise NoMatch(f"{node.name} is also read by {user.name}")
    values = product.args[1]
    if not isinstance(values, fx.Node):
        raise NoMatch("the values are not a tensor")
    query = find_layout(scores.query, may_repeat=False)
    key, val = find_layout(scores.key, transposed=True), find_layout(values)
    if query is None or key is None or val is None:
        raise NoMatch("q, k or v is not laid out as [batch, heads, tokens, dim]")
    if len(shape(out)) != 4 and not traced.paged:
        raise NoMatch("batch and heads share one dim")
    with traced.graph.inserting_before(out):
        mask = _join_masks(traced, scores.masks)
        new = insert_attention(
            traced,
            insert_layout(traced, query),
            _as_heads(traced, scores.key, key, val, transposed=True),
            _as_heads(traced, values, val, key, transposed=False),
            key,
            val,
            mask=mask,
            scale=scores.scale,
            softcap=scores.softcap,
            sinks=scores.sinks,
        )
        new.meta["nn_module_stack"] = softmax.meta.get("nn_module_stack")
        if len(shape(out)) == 3:
            new = traced.method("squeeze", new, 0)
        if value(new).dtype != value(out).dtype:
            new = traced.method("to", new, value(out).dtype)
    if [str(s) for s in shape(new)] != [str(s) for s in shape(out)]:
        raise NoMatch(f"the result has shape {tuple(shape(out))}, attention gives {tuple(shape(new))}")
    out.replace_all_uses_with(new)


def _as_heads(
    traced: TracedGraph, operand: fx.Node, layout: HeadLayout, other: HeadLayout, *, transposed: bool
) -> fx.Node:
    """The operand itself as ``[batch, heads, tokens, dim]``, for when its base cannot stand for it."""
    if layout.heads == other.heads:
        return operand
    if len(shape(operand)) == 3:
        operand = traced.method("unsqueeze", operand, 0)
    return traced.method("transpose", operand, -1, -2) if transposed else operand


def _drops_last(index: Any) -> bool:
    last = index[-1] if isinstance(index, tuple) else index
    return isinstance(last, slice) and (last.start in (None, 0)) and last.stop == -1 and last.step is None


def _only_feeds_maximum(user: fx.Node, inside: set[fx.Node]) -> bool:
    """``scores.max(...)``, subtracted for stability: softmax does the same by itself."""
    if callee(user) in ("max", "amax"):
        return all(_only_feeds_maximum(u, inside) or u in inside for u in user.users)
    return callee(user) in ("getitem", "getattr", "values") and all(u in inside for u in user.users)


def _read_scores(traced: TracedGraph, start: Any) -> _Scores:
    """Walk from the softmax's input back to the product of q and k."""
    node, factor, softcap, sinks = start, 1.0, 0.0, None
    masks: list[_Mask] = []
    nodes: list[fx.Node] = []
    masked = 0
    for _ in range(24):
        if not isinstance(node, fx.Node):
            raise NoMatch("the scores are not a tensor")
        name = callee(node)
        nodes.append(node)
        if name in _MATMULS:
            break
        if name in _CASTS or name in ("view", "reshape"):
            if is_tensor(node) and value(node).dtype in (torch.bool, torch.int64):
                raise NoMatch("the scores are integers")
            node = node.args[0]
        elif name == "sub" and _is_maximum(node.args[1], node.args[0]):
            node = node.args[0]
        elif name == "cat":
            node, sinks = _split_sinks(node)
        elif name in ("add", "iadd", "add_"):
            scores, bias = _which_is_scores(node)
            masks.append(_Mask(bias, None, factor))
            node = scores
        elif name == "where":
            condition, first, second = node.args[:3]
            keep = _is_very_negative(traced, second)
            if not isinstance(condition, fx.Node) or not (keep or _is_very_negative(traced, first)):
                raise NoMatch("where() that does not mask")
            masks.append(_Mask(condition, keep))
            node = first if keep else second
        elif name in ("masked_fill", "masked_fill_"):
            if not _is_very_negative(traced, argument(node, 2, "value")):
                raise NoMatch("masked_fill() with a value that does not mask")
            masks.append(_Mask(node.args[1], False))  # type: ignore[arg-type]
            node = node.args[0]
        elif name in ("max", "maximum", "clamp", "clamp_min") and _is_floor(traced, node):
            node = node.args[0]
        elif name in ("mul", "imul", "mul_", "truediv", "div", "div_", "itruediv"):
            node, number = _factor(traced, node)
            if callee(node) in ("tanh", "tanh_"):
                if name not in ("mul", "imul", "mul_") or softcap or factor != 1.0:
                    raise NoMatch("tanh that is not a softcap")
                nodes.append(node)
                softcap, node = number, node.args[0]
                if not isinstance(node, fx.Node):
                    raise NoMatch("tanh of no tensor")
                nodes.append(node)
                divided, by = _factor(traced, node)
                by = by if callee(node) in ("truediv", "div", "div_", "itruediv") else 1.0 / by
                if abs(by - softcap) > 1e-6 * abs(softcap):
                    raise NoMatch(f"tanh(s / {by}) * {softcap} is not a softcap")
                node = divided
            else:
                factor *= number if name in ("mul", "imul", "mul_") else 1.0 / number
        else:
            raise NoMatch(f"{name} between the scores and the softmax")
        if softcap and len(masks) > masked:
            raise NoMatch("a mask inside the softcap")
        masked = len(masks)
    else:
        raise NoMatch("no product of q and k within 24 steps")
    query, key = argument(node, 0, "input"), argument(node, 1, "other", node.kwargs.get("mat2"))
    if callee(node) == "baddbmm":
        bias, query, key = (argument(node, i, n) for i, n in enumerate(("input", "batch1", "batch2")))
        beta = _constant(traced, node.kwargs.get("beta", 1.0))
        alpha = _constant(traced, node.kwargs.get("alpha", 1.0))
        if beta is None or alpha is None:
            raise NoMatch("baddbmm with computed beta or alpha")
        if beta:
            masks.append(_Mask(bias, None, factor * beta))
        factor *= alpha
    if not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
        raise NoMatch("q or k is not a tensor")
    return _Scores(query, key, factor, softcap, masks, sinks, nodes)


def _is_maximum(item: Any, of: Any) -> bool:
    if callee(item) in ("getitem", "getattr", "values") and isinstance(item, fx.Node):
        item = item.args[0]
    return callee(item) in ("max", "amax") and item.args[0] is of


def _split_sinks(node: fx.Node) -> tuple[Any, fx.Node]:
    parts = argument(node, 0, "tensors")
    if len(parts) != 2 or argument(node, 1, "dim", 0) not in (-1, len(shape(node)) - 1):
        raise NoMatch("cat that appends no sink")
    sink = parts[1]
    while callee(sink) in (
        "expand",
        "reshape",
        "view",
        "to",
        "getitem",
        "unsqueeze",
        "repeat",
        "float",
        "type_as",
    ):
        sink = sink.args[0]
    if sink.op != "placeholder" or len(shape(sink)) != 1:
        raise NoMatch("the sink is no per-head parameter")
    return parts[0], sink


def _reaches_product(node: Any, depth: int = 16) -> bool:
    while isinstance(node, fx.Node) and depth:
        if callee(node) in _MATMULS:
            return True
        if not node.args:
            return False
        first = node.args[0]
        if isinstance(first, (list, tuple)):
            first = first[0] if first else None
        node, depth = first, depth - 1
    return False


def _which_is_scores(node: fx.Node) -> tuple[Any, fx.Node]:
    a, b = node.args[:2]
    if isinstance(b, fx.Node) and is_tensor(b) and not _reaches_product(b):
        return a, b
    if isinstance(a, fx.Node) and is_tensor(a) and not _reaches_product(a):
        return b, a
    raise NoMatch("a bias computed from the tokens is added to the scores")


def _factor(traced: TracedGraph, node: fx.Node) -> tuple[Any, float]:
    """Split a product or quotient into its tensor and its number."""
    a, b = node.args[:2]
    number = _constant(traced, b)
    if number is not None:
        return a, number
    number = _constant(traced, a)
    if number is not None and callee(node) in ("mul", "imul", "mul_"):
        return b, number
    raise NoMatch("the scores are multiplied by a tensor")


def _constant(traced: TracedGraph, item: Any) -> float | None:
    """The number behind a literal, a size, or a one-element tensor computed from constants."""
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return float(item)
    if not isinstance(item, fx.Node):
        return None
    if is_size(item) and not isinstance(value(item), (int, float)):
        return None
    if is_tensor(item) and value(item).numel() != 1:
        return None
    evaluation = Evaluation(traced, small_sizes(item))
    try:
        result = float(evaluation(item))
    except (DependsOnData, TypeError, ValueError, RuntimeError):
        return None
    traced.notes.fold(evaluation.sources(item))
    return result


def _is_very_negative(traced: TracedGraph, item: Any) -> bool:
    number = _constant(traced, item)
    return number is not None and number <= -1e4


def _is_floor(traced: TracedGraph, node: fx.Node) -> bool:
    """True if a call only lifts scores to the least number of their dtype, or nearly so."""
    if callee(node) == "clamp" and argument(node, 2, "max") is not None:
        return False
    least = _constant(traced, argument(node, 1, "min"))
    return least is not None and least <= max(_LEAST, torch.finfo(value(node).dtype).min)


def _join_masks(traced: TracedGraph, masks: list[_Mask]) -> fx.Node | None:
    """One mask for all of them: bool when all are, else added to the scores."""
    kept: fx.Node | None = None
    added: fx.Node | None = None
    for mask in masks:
        node = mask.node
        if mask.keep is not None:
            if value(node).dtype != torch.bool:
                node = traced.method("to", node, torch.bool)
            if not mask.keep:
                node = traced.call(torch.logical_not, node)
            kept = node if kept is None else traced.call(torch.logical_and, kept, node)
        else:
            if mask.factor != 1.0:
                node = traced.call(torch.mul, node, mask.factor)
            added = node if added is None else traced.call(torch.add, added, node)
    if kept is None or added is None:
        return kept if added is None else added
    floor = float(torch.finfo(value(added).dtype).min)
    return traced.call(torch.where, kept, added, floor)
