"""Peak memory of the tensors of a step, from the shapes in its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...passes import TracedGraph
from ...passes.graph.attention_node import PAGED_ATTENTION, PagedAttentionCall
from ...passes.graph.fx_nodes import value
from ...passes.graph.provenance import launches_work
from ...runtime.ops.attention.lightning_indexer import MOST_SCORES, lightning_indexer, lightning_indexer_seq
from ...runtime.program import is_cache_input
from .traffic import Sizes, Step, is_weight


def peak_live_bytes(traced: TracedGraph, step: Step) -> int:
    """The most bytes that inputs, intermediates and outputs of one step take at the same time.

    An estimate. A tensor lives from the operator that makes it to the last one that reads it or a view of it; an
    operator's inputs and results live together, and what indexers and the attention behind them take while they run.
    Weights and caches do not count, nor does what other operators take while they run (scratch memory of products and
    of attention) or an allocator keeps. Inductor, which fuses operators, takes less.

    Args:
        traced: the rewritten graph.
        step: its tokens, their context, and the requested rows of logits.
    """
    sizes = Sizes(traced, step)
    nodes = list(traced.graph.nodes)
    owner: dict[fx.Node, fx.Node] = {}
    last_read: dict[fx.Node, int] = {}
    for at, node in enumerate(nodes):
        for read in node.all_input_nodes:
            last_read[owner[read]] = at
        owner[node] = owner[node.all_input_nodes[0]] if _is_view(node) else node
        # What nobody reads lives while it is made; a view of it keeps it.
        last_read[owner[node]] = at
    ends: dict[int, list[fx.Node]] = {}
    for node, at in last_read.items():
        ends.setdefault(at, []).append(node)
    live = peak = 0
    held: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op == "placeholder" and not is_weight(traced, node) and not is_cache_input(node.name):
            # A step's inputs belong to the caller, who holds them until its end.
            live += sum(sizes.stored_bytes(v) for v in pytree.tree_leaves(value(node)))
    for at, node in enumerate(nodes):
        if node.op.startswith("call") and owner[node] is node:
            held[node] = sum(sizes.stored_bytes(v) for v in pytree.tree_leaves(value(node)))
            live += held[node]
        peak = max(peak, live + _scratch_bytes(node, sizes, step))
        for ended in ends.get(at, ()):
            live -= held.pop(ended, 0)
    return peak


def _scratch_bytes(node: fx.Node, sizes: Sizes, step: Step) -> int:
    """What an operator over chosen keys holds while it runs: the indexer's scores of single heads in float32 and
    their next form, and the attention's mask of the context."""
    if node.target in (lightning_indexer, lightning_indexer_seq):
        _, tokens, heads, _ = sizes.shape(node.args[0])
        chosen: Any = node.args[3]
        scored = step.context > chosen
        return 8 * min(tokens * heads * step.context, max(MOST_SCORES, heads * step.context)) if scored else 0
    if node.target is PAGED_ATTENTION and PagedAttentionCall.of(node).selected is not None:
        return step.tokens * (step.context + 1)
    return 0


def _is_view(node: fx.Node) -> bool:
    """True if a node's tensors are those of its first input, or parts of them."""
    if not node.op.startswith("call") or launches_work(node) or not node.all_input_nodes:
        return False
    return any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value(node)))
