"""Rotate the queries and keys of a layer in one operator.

Matches:
    (q',) = pagoda::rope([q], cos, sin, ...); (k',) = pagoda::rope([k], cos, sin, ...)      # the same tables
Becomes:
    q', k' = pagoda::rope([q, k], cos, sin, ...)
Why it is faster:
    one launch instead of two.

Level 2.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..graph.data_movement import TRANSPOSES
from ..graph.fx_nodes import callee
from ..graph.record import PassRecord
from ..graph.traced import TracedGraph

ROPE = torch.ops.pagoda.rope.default
_VIEWS = TRANSPOSES | {"view", "slice.Tensor", "unsqueeze", "squeeze.dim", "select.int"}


def group_rope(traced: TracedGraph) -> PassRecord:
    """Merge rotations that share tables and mode into the first of each run that no result stands between."""
    record = PassRecord("group_rope")
    group: list[fx.Node] = []
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or node.target is not ROPE:
            continue
        if group and node.args[1:] == group[0].args[1:] and _fits(group, node):
            group.append(node)
            continue
        record.matches += _merge(traced, group)
        group = [node]
    record.matches += _merge(traced, group)
    return record


def _readers(group: list[fx.Node]) -> list[fx.Node]:
    return [reader for node in group for item in node.users for reader in item.users]


def _fits(group: list[fx.Node], node: fx.Node) -> bool:
    """Tell whether the inputs of ``node`` exist before a result of ``group`` is read, or can be had by views."""
    readers = _readers(group)
    return not readers or _views_behind(node, min(readers)) is not None


def _views_behind(node: fx.Node, place: fx.Node) -> list[fx.Node] | None:
    """The views that ``node`` reads and that stand behind ``place``, in order; None when it reads more than views."""
    found: list[fx.Node] = []
    pending = [n for n in node.all_input_nodes if n >= place]
    while pending:
        n = pending.pop()
        if n in found:
            continue
        if n is place or callee(n) not in _VIEWS:
            return None
        found.append(n)
        pending += [m for m in n.all_input_nodes if m >= place]
    return sorted(found)


def _merge(traced: TracedGraph, group: list[fx.Node]) -> int:
    """One operator for the whole group, in front of what reads it; 1 if there was more than one."""
    if len(group) < 2:
        return 0
    place = min([group[-1], *_readers(group)])
    for node in group:
        for view in _views_behind(node, place) or ():
            place.prepend(view)
    inputs = [x for node in group for x in node.args[0]]  # type: ignore[union-attr]
    with traced.before(place):
        whole = traced.call(ROPE, inputs, *group[-1].args[1:])
        index = 0
        for node in group:
            count = len(node.args[0])  # type: ignore[arg-type]
            for item in list(node.users):
                part = traced.call(operator.getitem, whole, index + int(item.args[1]))  # type: ignore[arg-type]
                traced.substitute(item, part)
            index += count
    for node in group:
        traced.graph.erase_node(node)
    return 1
