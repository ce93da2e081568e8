"""The canonical attention call: how passes insert it and read it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ...runtime import ops  # noqa: F401  registers the pagoda operators
from ...runtime.ops.arguments import AttentionArguments, PagedAttentionArguments
from .fx_nodes import shape
from .fx_nodes import value as fake
from .head_layout import HeadLayout, insert_layout
from .traced import TracedGraph

ATTENTION = torch.ops.pagoda.attention.default
PAGED_ATTENTION = torch.ops.pagoda.paged_attention.default


class AttentionCall(AttentionArguments[fx.Node]):
    """The arguments of one ``pagoda::attention`` node, by name."""

    __slots__ = ()

    @staticmethod
    def of(node: fx.Node) -> AttentionCall:
        return AttentionCall(*node.args)  # type: ignore[arg-type]

    def arguments(self) -> tuple[Any, ...]:
        return tuple(self)

    def changed(self, **changes: Any) -> AttentionCall:
        return self._replace(**changes)


class PagedAttentionCall(PagedAttentionArguments[fx.Node]):
    """The arguments of one ``pagoda::paged_attention`` node, by name."""

    __slots__ = ()

    @staticmethod
    def of(node: fx.Node) -> PagedAttentionCall:
        return PagedAttentionCall(*node.args)  # type: ignore[arg-type]


def attention_nodes(traced: TracedGraph) -> Iterator[fx.Node]:
    """All ``pagoda::attention`` nodes, in graph order."""
    return iter([n for n in traced.graph.nodes if n.op == "call_function" and n.target is ATTENTION])


def paged_attention_nodes(traced: TracedGraph) -> Iterator[fx.Node]:
    """All ``pagoda::paged_attention`` nodes, in graph order."""
    return iter([n for n in traced.graph.nodes if n.op == "call_function" and n.target is PAGED_ATTENTION])


def insert_attention(
    traced: TracedGraph,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    key_layout: HeadLayout,
    value_layout: HeadLayout,
    *,
    mask: fx.Node | None,
    scale: float,
    is_causal: bool = False,
    softcap: float = 0.0,
    sinks: fx.Node | None = None,
) -> fx.Node:
    """Insert ``pagoda::attention`` at the graph's insertion point.

    ``query`` is ``[batch, heads, tokens, dim]``; keys and values come from their layouts, un-repeated when both
    have the same number of heads, else as they were. Queries and keys that the model keeps in another dtype (GPT-J
    rotates in float32) are rounded to that of the values, which is the cache's.
    """
    if key_layout.heads == value_layout.heads or len(shape(key)) == 3:
        key, value = insert_layout(traced, key_layout), insert_layout(traced, value_layout)
    dtype = fake(value).dtype
    query, key = (node if fake(node).dtype == dtype else traced.method("to", node, dtype) for node in (query, key))
    call = AttentionCall(query, key, value, mask, sinks, None, scale, is_causal, 0, 0, softcap)
    return traced.call(ATTENTION, *call.arguments())
