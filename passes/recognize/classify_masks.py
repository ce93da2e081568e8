"""Turn mask tensors into attributes of attention.

Matches:
    pagoda::attention(q, k, v, mask=<T×T tensor made of positions only>, ...)
Becomes:
    pagoda::attention(q, k, v, mask=None, is_causal=True, sliding_window=w, chunk=c, alibi_slopes=s)
Why it is faster:
    no T×T tensor is made, and a flat step of many sequences has no use for one.

Level 0.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph.attention_node import AttentionCall, attention_nodes
from ..graph.evaluate import Evaluation
from ..graph.fx_nodes import closure, shape, value
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph
from .mask_kind import MaskKind, UnknownMask, probe

_HALF = (torch.bfloat16, torch.float16)
_ROUNDED = (
    "the model rounds its ALiBi bias to {0}, but here it is exact: the longer the context, the more the logits "
    "differ from the model's own in {0}"
)


def classify_masks(traced: TracedGraph) -> PassRecord:
    """Classify the mask of every ``pagoda::attention`` and drop the tensor. Flat (paged) graphs only."""
    known: dict[fx.Node, MaskKind | UnknownMask] = {}
    rounded: dict[torch.dtype, None] = {}
    slopes: dict[fx.Node, fx.Node] = {}

    def step(node: fx.Node) -> str | None:
        call = AttentionCall.of(node)
        if call.attn_mask is None:
            return None
        if call.attn_mask not in known:
            try:
                known[call.attn_mask] = probe(traced, call.attn_mask, int(shape(call.query)[1]))
            except UnknownMask as reason:
                known[call.attn_mask] = reason
            else:
                traced.notes.fold(Evaluation(traced, {}).sources(call.attn_mask))
        kind = known[call.attn_mask]
        if isinstance(kind, UnknownMask):
            return str(kind)
        if kind.literal:
            names = {n.name for n in closure(call.attn_mask)}
            traced.notes.followed_literals.setdefault(kind.literal, set()).update(names)
        if kind.alibi_slopes is not None and call.attn_mask not in slopes:
            slopes[call.attn_mask] = traced.add_constant(f"alibi_slopes_{len(slopes)}", kind.alibi_slopes)
            if (dtype := value(call.attn_mask).dtype) in _HALF:
                rounded[dtype] = None
        changed = call.changed(
            attn_mask=None,
            is_causal=True,
            sliding_window=kind.sliding_window,
            chunk=kind.chunk,
            alibi_slopes=slopes.get(call.attn_mask),
        )
        node.args = changed.arguments()
        return ""

    record = rewrite_each(traced, "classify_masks", step, attention_nodes(traced) if traced.paged else ())
    record.remarks += [_ROUNDED.format(str(dtype).removeprefix("torch.")) for dtype in rounded]
    return record
