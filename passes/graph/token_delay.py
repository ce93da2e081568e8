"""Rows of earlier tokens of the same sequence: inserted by passes, and compared with the original."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ...runtime.ops.state.causal_conv1d import causal_conv1d_seq
from .evaluate import DependsOnData, Evaluation, at_sizes
from .fx_nodes import shape, value
from .traced import TracedGraph

MOST_TAPS = 8
"""Of a convolution with a state."""
_LENGTHS = (1, 3, 11)
_TOLERANCE = 1e-4


def insert_delayed(traced: TracedGraph, rows: fx.Node, by: int, first: fx.Node | None) -> fx.Node:
    """Insert the rows ``[1, T, C]`` of the tokens ``by`` positions earlier, at the graph's insertion point.

    Args:
        traced: a flat (paged) graph.
        rows: ``[1, T, C]``.
        by: from 1 to 7.
        first: what the first tokens of a sequence get, broadcastable to ``[1, T, C]``; None for zeros.
    """
    channels, dtype = int(shape(rows)[2]), value(rows).dtype
    taps = traced.shared_constant(
        f"delay_{by}_of_{channels}_{str(dtype).removeprefix('torch.')}",
        lambda: torch.eye(1, by + 1, dtype=dtype, device=value(rows).device).expand(channels, -1).contiguous(),
    )
    delayed = traced.call(causal_conv1d_seq, rows, taps, None, "")
    if first is None:
        return delayed
    if not traced.position_ids:
        traced.add_position_input()
    positions = traced.method("unsqueeze", traced.placeholder(traced.position_ids), -1)
    return traced.call(torch.where, traced.call(torch.lt, positions, by), first, delayed)


def same_numbers(traced: TracedGraph, old: fx.Node, new: fx.Node, given: Iterable[fx.Node]) -> bool:
    """Return True if two nodes yield the same with random numbers for ``given``, at a few numbers of tokens."""
    for tokens in _LENGTHS:
        sizes = {traced.token_symbol: tokens}
        generator = torch.Generator().manual_seed(tokens)
        numbers = {
            node: torch.randn(at_sizes(shape(node), sizes), generator=generator).to(value(node).dtype)
            for node in given
        }
        try:
            a, b = (Evaluation(traced, sizes, given=numbers)(node) for node in (old, new))
        except (DependsOnData, RuntimeError, TypeError, ValueError, IndexError):
            return False
        tolerance = max(_TOLERANCE, 16 * torch.finfo(a.dtype).eps)
        if a.shape != b.shape or a.dtype is not b.dtype or not torch.allclose(a, b, rtol=tolerance, atol=tolerance):
            return False
    return True
