"""How many bytes the operators of a graph read and write, from the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...passes import TracedGraph
from ...passes.fx_nodes import callee, value
from ...passes.provenance import launches_work

TOKENS = 128
"""Tokens of the step that is counted, all of one sequence."""

# They read the rows that they are asked for, not the whole table.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})


@dataclass(frozen=True)
class Traffic:
    """Bytes that operators move.

    Attributes:
        per_token: activations read and written, keys and values in the cache included, per token of the step.
        weights: parameters and tables read, per step.
    """

    per_token: float
    weights: int


def traffic(traced: TracedGraph, nodes: Iterable[fx.Node], tokens: int = TOKENS) -> Traffic:
    """What the operators among ``nodes`` read and write, each by itself, in a step of ``tokens`` tokens.

    Nothing is taken to stay in a processor's cache between two operators; an input read twice by one operator counts
    once, and a broadcast tensor at the size that is stored.
    """
    activations = weights = 0
    for node in nodes:
        if not launches_work(node):
            continue
        results = sum(_stored_bytes(v, tokens) for v in pytree.tree_leaves(value(node)))
        activations += results
        for read in node.all_input_nodes:
            size = _stored_bytes(value(read), tokens)
            source = _source(read)
            if source.op == "placeholder" and source.name in traced.constants:
                weights += min(size, results) if callee(node).partition(".")[0] in _GATHERS else size
            elif source.op == "placeholder" and source.name.startswith(("key_cache_", "value_cache_")):
                row = value(source)
                activations += 2 * tokens * _bytes(row.shape[2:], row.dtype, tokens)
            else:
                activations += size
    return Traffic(activations / tokens, weights)


def _source(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of."""
    while node.op == "call_function" and not launches_work(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _stored_bytes(v: Any, tokens: int) -> int:
    if not isinstance(v, torch.Tensor):
        return 0
    strides = v.stride() if v.layout == torch.strided else (1,) * v.dim()
    kept = [size for size, stride in zip(v.shape, strides, strict=True) if not (type(stride) is int and stride == 0)]
    return _bytes(kept, v.dtype, tokens)


def _bytes(shape: Iterable[Any], dtype: torch.dtype, tokens: int) -> int:
    """Bytes of a tensor whose symbolic sizes all stand for the number of tokens."""
    count = dtype.itemsize
    for size in shape:
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            count *= int(expression.subs({symbol: tokens for symbol in expression.free_symbols}))
        else:
            count *= size
    return count
