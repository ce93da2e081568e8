"""Recognize attention over keys that an indexer has chosen: DeepSeek Sparse Attention.

Matches:
    scores = (weights · relu(q_i @ k_i.T * scale)).sum(heads)          # of every token and key
    chosen = masked(scores).topk(min(K, T)).indices
    pagoda::attention(q, k, v, mask=base & scattered(chosen), ...)     # any spelling; base is made of positions
Becomes:
    selected = pagoda::lightning_indexer_seq(q_i, k_i, weights, K, scale)
    pagoda::attention(q, k, v, mask=base, ..., selected=selected)
Why it is faster:
    no T×T scores and masks are stored, and later passes can keep the indexer's keys in a paged cache.

Layers that share a choice share the operator. Level 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...runtime.ops.attention.lightning_indexer import lightning_indexer_seq
from ..graph.attention_node import AttentionCall, attention_nodes
from ..graph.data_movement import CAST_CALLS
from ..graph.evaluate import DependsOnData, Evaluation
from ..graph.fx_nodes import callee, is_tensor, shape
from ..graph.limits import SMALL_CONSTANT
from ..graph.record import NoMatch, PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.token_dims import token_dims
from ..graph.traced import TracedGraph
from .indexer import choices, find_indexer, insert_per_token

_TOKENS = 11
_FEW = 4
_HIDDEN = -1e4


def recognize_indexed_attention(traced: TracedGraph) -> PassRecord:
    """Give every attention whose mask an indexer makes the keys that it chooses. Flat (paged) graphs only."""
    selected: dict[fx.Node, fx.Node] = {}

    def step(node: fx.Node) -> str | None:
        call = AttentionCall.of(node)
        if call.attn_mask is None or call.selected is not None:
            return None
        found = list(choices(traced, call.attn_mask))
        if not found:
            return None
        if len(found) > 1:
            raise NoMatch(f"{len(found)} choices of keys make its mask")
        base = _base(traced, call.attn_mask, found[0])
        if found[0] not in selected:
            selected[found[0]] = _insert(traced, node, found[0])
        node.args = call.changed(attn_mask=base, selected=selected[found[0]]).arguments()
        return ""

    return rewrite_each(traced, "recognize_indexed_attention", step, attention_nodes(traced) if traced.paged else ())


def _insert(traced: TracedGraph, attention: fx.Node, choice: fx.Node) -> fx.Node:
    found = find_indexer(traced, choice)
    with traced.before(attention, like=choice):
        query = insert_per_token(traced, found.query, found.heads, found.dim)
        key = insert_per_token(traced, found.key, found.dim)
        weights = insert_per_token(traced, found.weights, found.heads)
        new = traced.call(lightning_indexer_seq, query, key, weights, found.topk, found.scale)
    if found.topk > SMALL_CONSTANT:
        traced.notes.followed_literals.setdefault(found.topk, set()).add(found.topk_size.name)
    return new


def _base(traced: TracedGraph, mask: fx.Node, choice: fx.Node) -> fx.Node:
    """The mask that is left where all keys are chosen, which the choice narrows by what was not.

    Raises:
        NoMatch: what is made of the choice is not that.
    """
    joined = mask
    while callee(joined) in CAST_CALLS | {"contiguous"} and isinstance(joined.args[0], fx.Node):
        joined = joined.args[0]
    made = _downstream(choice)
    others = [n for n in joined.all_input_nodes if n not in made and len(token_dims(traced, n)) >= 2]
    if len(others) != 1:
        raise NoMatch(f"{joined.name} joins no mask of positions with the choice")
    (base,) = others
    chosen = torch.stack([torch.randperm(_TOKENS, generator=_generator(i))[:_FEW] for i in range(_TOKENS)])
    every = torch.arange(_TOKENS).expand(_TOKENS, -1)
    try:
        of_base = Evaluation(traced, {traced.token_symbol: _TOKENS})(base)
        of_few, of_every = (_run(traced, mask, choice, indices) for indices in (chosen, every))
    except DependsOnData as reason:
        raise NoMatch(f"the mask beside the choice depends on the tokens ({reason})") from None
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise NoMatch(f"the mask cannot be run: {error}") from None
    of_base = of_base.expand(of_every.shape)
    among = torch.zeros(_TOKENS, _TOKENS, dtype=torch.bool).scatter(1, chosen, True)
    if not _same(of_every, of_base, torch.ones_like(among)) or not _same(of_few, of_base, among):
        raise NoMatch("the mask does not hide just the keys that were not chosen")
    traced.notes.fold(Evaluation(traced, {}, given={choice: None}).sources(mask))
    return base


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _run(traced: TracedGraph, mask: fx.Node, choice: fx.Node, indices: torch.Tensor) -> torch.Tensor:
    """The mask for a choice ``[T, k]``."""
    given = {choice: indices.expand(*shape(choice)[:-2], *indices.shape).contiguous()}
    found = Evaluation(traced, {traced.token_symbol: _TOKENS}, given=given)(mask)
    if tuple(found.shape[-2:]) != (_TOKENS, _TOKENS):
        raise NoMatch(f"the mask has shape {tuple(found.shape)}")
    return found


def _same(mask: torch.Tensor, base: torch.Tensor, among: torch.Tensor) -> bool:
    """True if ``mask`` is ``base`` with all hidden but ``among``."""
    if mask.dtype is torch.bool:
        return base.dtype is torch.bool and torch.equal(mask, base & among)
    if not mask.is_floating_point() or not base.is_floating_point():
        return False
    seen = (base > _HIDDEN) & among
    return torch.equal(mask > _HIDDEN, seen) and torch.equal(mask[seen], base[seen].to(mask.dtype))


def _downstream(choice: fx.Node) -> set[fx.Node]:
    """What reads the choice, and what reads that."""
    found: set[fx.Node] = set()
    pending: list[Any] = [choice]
    while pending:
        node = pending.pop()
        if node not in found and is_tensor(node):
            found.add(node)
            pending += node.users
    return found
