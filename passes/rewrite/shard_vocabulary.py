"""Let several ranks hold a large table of embeddings, and the output projection, together.

Matches:
    y = embedding(W, ids)
    logits = linear(x, W)                                # on the whole hidden state
Becomes:                                                  # on every rank
    y = all_reduce(embedding_of_rank(W[part], ids, first))
    logits = all_gather(linear(x, W[part]))
Why:
    in a large model these are as much as several layers, which every rank would hold and read whole.

Level 0: what is cut at all is asked for. Adding zeros is exact. Tied weights have one part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from ...runtime.ops.collectives import GROUP
from ..graph.cut import Cut, deal
from ..graph.fx_nodes import callee, shape, value
from ..graph.notes import Part
from ..graph.record import PassRecord
from ..graph.traced import TracedGraph
from ..sharding.slices import part_of

_aten, _pagoda = torch.ops.aten, torch.ops.pagoda
LEAST_PARAMETERS = 64 << 20
"""Of a table that is cut: the exchange for a smaller one costs more than reading it."""


def shard_vocabulary(traced: TracedGraph) -> PassRecord:
    """Cut tables of ``LEAST_PARAMETERS`` and more along their rows."""
    record = PassRecord("shard_vocabulary")
    if traced.ranks == 1:
        return record
    for weight in traced.placeholders:
        if weight.name not in traced.constants or weight.name in traced.notes.parts:
            continue
        if len(shape(weight)) != 2 or value(weight).numel() < LEAST_PARAMETERS:
            continue
        readers = list(weight.users)
        if not readers or not all(_reads_rows(user, weight) for user in readers):
            record.reject(weight, "something other than a look-up and a linear layer reads it")
            continue
        _cut(traced, weight, readers)
        record.matches += 1
    return record


def _reads_rows(node: fx.Node, weight: fx.Node) -> bool:
    if node.target is _aten.embedding.default:
        return node.args[0] is weight and not any(node.args[3:])
    return node.target is _aten.linear.default and node.args[1] is weight and len(node.args) == 2


def _cut(traced: TracedGraph, weight: fx.Node, readers: list[fx.Node]) -> None:
    whole = traced.constants[weight.name]
    rows = int(shape(weight)[0])
    cut = Cut(0, deal(rows, 1, traced.ranks))
    part = part_of(whole, cut, traced.rank)
    traced.constants[weight.name] = part
    traced.notes.parts[weight.name] = Part(whole, cut)
    with traced.fake_mode:
        weight.meta["example_value"] = torch.empty(part.shape, dtype=part.dtype, device=value(weight).device)
    for node in readers:
        (_look_up if callee(node) == "embedding" else _project)(traced, node, weight, rows, cut.local)


def _look_up(traced: TracedGraph, node: fx.Node, weight: fx.Node, rows: int, local: int) -> None:
    first = f"first_row_of_{weight.name}"
    if first not in traced.constants:
        firsts = Part(
            torch.arange(traced.ranks, device=value(weight).device) * local,
            Cut(0, tuple(np.array([rank]) for rank in range(traced.ranks))),
        )
        traced.notes.parts[first] = firsts
        traced.add_constant(first, part_of(firsts.whole, firsts.cut, traced.rank))
    with traced.before(node, like=node):
        own = traced.call(_pagoda.embedding_of_rank.default, weight, node.args[1], traced.placeholder(first))
        found = traced.call(_pagoda.all_reduce.default, own, GROUP)
    traced.substitute(node, found)


def _project(traced: TracedGraph, node: fx.Node, weight: fx.Node, rows: int, local: int) -> None:
    readers: Any = list(node.users)
    traced.propagate(node)
    with traced.before(node.next, like=node):
        found = traced.call(_pagoda.all_gather.default, node, traced.ranks, GROUP)
        if local * traced.ranks != rows:  # without the rows of zeros
            found = traced.call(_aten.slice.Tensor, found, len(shape(found)) - 1, 0, rows)
    for user in readers:
        user.replace_input_with(node, found)
