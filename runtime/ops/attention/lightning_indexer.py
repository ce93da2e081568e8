"""`pagoda::lightning_indexer`: the keys that each token's attention reads, chosen by a small scorer of its own.

The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, 2025).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..registration import Facts, register_operator
from .selected_keys import NO_KEY

aten = torch.ops.aten

MOST_SCORES = 1 << 24
"""Scores of single heads that are held at once: 64 MiB."""
_TENSORS = "Tensor query, Tensor key, Tensor weights, int topk, float scale"
_PAGED = "Tensor(a!) key_cache, Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens"


class IndexerArguments(NamedTuple):
    """The arguments of ``pagoda::lightning_indexer``, in the order of its schema.

    Attributes:
        query: ``[1, T, H, D]`` floating point; the tokens of all sequences, flat. Any strides, in all arguments.
        key: ``[1, T, D]``: one head, which all of the query's read.
        weights: ``[1, T, H]`` floating point.
        topk: the most keys that are chosen for a token.
        scale: factor of ``q·k``, positive.
        key_cache: ``[num_blocks, block_size, 1, D]`` in a dtype that holds the key's values; written.
        slot_mapping, block_table, query_start_loc, seq_lens: as in ``PagedAttentionArguments``.
    """

    query: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor
    topk: int
    scale: float
    key_cache: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


def lightning_indexer_seq_reference(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, topk: int, scale: float
) -> torch.Tensor:
    """The keys of one sequence that each of its tokens reads: ``pagoda::lightning_indexer_seq``.

    Key j scores ``sum over h of weights[i, h] · relu(scale · query[i, h] · key[j])`` for token i; of the keys
    ``j <= i`` the ``topk`` with the highest scores are chosen, or all where there are no more. Of equal scores the
    earlier keys are taken, so that the choice depends on nothing but the scores: neither on the other tokens of a
    step nor on how the sequence was cut. torch.topk, which models call, takes any of them.

    Arithmetic is in float32, or float64 if the query is.

    Args:
        query, key, weights, topk, scale: as in :class:`IndexerArguments`.

    Returns:
        ``[1, T, topk]`` int32: positions in ascending order, then ``NO_KEY``.

    Raises:
        RuntimeError: of the operator, where grad mode is on and an input requires grad.
        ValueError: shapes or dtypes that do not fit.
    """
    _check(query, key, weights, topk, scale)
    return _chosen(query[0], key[0], weights[0], topk, scale, 0)[None]


def lightning_indexer_reference(*arguments: Any) -> torch.Tensor:
    """The same for one flat step of many sequences over a paged cache of keys: ``pagoda::lightning_indexer``.

    First every token's key goes to its cache slot; then token i of sequence s, at position
    ``p = seq_lens[s] - n_s + i``, chooses among the positions ``j <= p`` of its sequence. Where a sequence has no
    more than ``topk`` tokens nothing is scored. There is no other kernel: torch computes the products.

    Args:
        arguments: the fields of :class:`IndexerArguments`, in order.

    Returns:
        ``[1, T, topk]`` int32, as :func:`lightning_indexer_seq_reference`; tokens of no sequence choose none.

    Raises:
        RuntimeError: of the operator, where grad mode is on and an input requires grad.
        ValueError: shapes or dtypes that do not fit, a slot or block id outside the cache, a context longer
            than its row of the block table. The cache may have been written by then.
    """
    call = IndexerArguments(*arguments)
    _check(call.query, call.key, call.weights, call.topk, call.scale)
    _check_cache(call)
    blocks, block_size = call.key_cache.shape[:2]
    slots = call.slot_mapping.long()
    written = slots >= 0
    place = slots[written]
    call.key_cache[place // block_size, place % block_size, 0] = call.key[0, written].to(call.key_cache.dtype)
    result = torch.full((1, call.query.shape[1], call.topk), NO_KEY, dtype=torch.int32, device=call.query.device)
    starts = call.query_start_loc.tolist()
    for sequence, context in enumerate(call.seq_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        if start == end:
            continue
        if context < end - start or context > call.block_table.shape[1] * block_size:
            raise ValueError(
                f"seq_lens[{sequence}] is {context}; it must be at least the sequence's {end - start} new tokens and "
                f"at most the {call.block_table.shape[1] * block_size} slots of its block_table row"
            )
        table = call.block_table[sequence, : -(-context // block_size)].long()
        if bool(((table < 0) | (table >= blocks)).any()):
            raise ValueError(f"block_table[{sequence}] holds a block that is not one of {blocks}")
        first = context - (end - start)
        if context <= call.topk:
            result[0, start:end] = _all_before(first, context, call.topk, result.device)
            continue
        keys = call.key_cache[table, :, 0].flatten(0, 1)[:context]
        rows = slice(start, end)
        result[0, rows] = _chosen(call.query[0, rows], keys, call.weights[0, rows], call.topk, call.scale, first)
    return result


def _all_before(first: int, context: int, topk: int, device: torch.device) -> torch.Tensor:
    """Of tokens at positions ``first`` to ``context - 1``, all keys that they see: ``[n, topk]`` int32."""
    j = torch.arange(topk, device=device, dtype=torch.int32)
    positions = torch.arange(first, context, device=device)[:, None]
    return aten.where(j <= positions, j, NO_KEY)


def _chosen(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, topk: int, scale: float, first: int
) -> torch.Tensor:
    """Of one sequence's tokens from position ``first`` on, ``[n, H, D]``, the chosen among its keys ``[L, D]``."""
    tokens, heads, dim = query.shape
    context = key.shape[0]
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys = key.to(dtype).T
    result = torch.full((tokens, topk), NO_KEY, dtype=torch.int32, device=query.device)
    rows = max(1, MOST_SCORES // max(1, heads * context))
    j = torch.arange(context, device=query.device)
    for start in range(0, tokens, rows):
        end = min(tokens, start + rows)
        scores = aten.relu(query[start:end].to(dtype).reshape(-1, dim) @ keys * scale)
        sums = aten.matmul(weights[start:end, None].to(dtype), scores.view(end - start, heads, context))[:, 0]
        seen = j <= torch.arange(first + start, first + end, device=query.device)[:, None]
        mask = _highest(sums.masked_fill_(~seen, -torch.inf), topk) & seen
        row, column = mask.nonzero(as_tuple=True)
        result[start + row, mask.cumsum(-1)[row, column] - 1] = column.to(torch.int32)
    return result


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` highest of each row stand; of equal ones the first. A NaN is higher than any number."""
    if scores.shape[-1] <= count:
        return torch.ones_like(scores, dtype=torch.bool)
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = scores.topk(count, dim=-1, sorted=True).values[..., -1:]
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def _check(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, topk: int, scale: float) -> None:
    if query.dim() != 4 or query.shape[0] != 1:
        raise ValueError(f"query has shape {tuple(query.shape)}; make it [1, T, H, D]")
    _, tokens, heads, dim = query.shape
    if key.shape != (1, tokens, dim) or weights.shape != (1, tokens, heads):
        raise ValueError(
            f"key {tuple(key.shape)} and weights {tuple(weights.shape)} do not fit query {tuple(query.shape)}; make "
            f"them {(1, tokens, dim)} and {(1, tokens, heads)}"
        )
    if not all(tensor.is_floating_point() for tensor in (query, key, weights)):
        raise ValueError(
            f"query, key and weights have dtypes {query.dtype}, {key.dtype}, {weights.dtype}; give floating point"
        )
    if topk < 1 or not scale > 0:
        raise ValueError(f"topk={topk} and scale={scale} have to be positive")


def _check_cache(call: IndexerArguments) -> None:
    tokens, dim = call.query.shape[1], call.query.shape[3]
    if call.key_cache.dim() != 4 or call.key_cache.shape[2:] != (1, dim):
        raise ValueError(
            f"key_cache has shape {tuple(call.key_cache.shape)}; make it [num_blocks, block_size, 1, {dim}]"
        )
    sequences = call.block_table.shape[0]
    slots, starts, lens = call.slot_mapping.shape, call.query_start_loc.shape, call.seq_lens.shape
    if slots != (tokens,) or starts != (sequences + 1,) or lens != (sequences,):
        raise ValueError(
            f"slot_mapping {tuple(slots)}, query_start_loc {tuple(starts)} and seq_lens {tuple(lens)} must be "
            f"[{tokens}], [{sequences + 1}] and [{sequences}]"
        )
    places = call.key_cache.shape[0] * call.key_cache.shape[1]
    if bool((call.slot_mapping >= places).any()):
        raise ValueError(f"slot_mapping holds a slot that is not one of {places}")


def _fake(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, topk: int, *_: object) -> torch.Tensor:
    return query.new_empty((1, query.shape[1], topk), dtype=torch.int32)


lightning_indexer_seq = register_operator(
    f"lightning_indexer_seq({_TENSORS}) -> Tensor",
    Facts(over="all", invariant=False, kind="", spelled_out=False),
    fake=_fake,
    reference=lightning_indexer_seq_reference,
    cpu=lightning_indexer_seq_reference,
)
lightning_indexer = register_operator(
    f"lightning_indexer({_TENSORS}, {_PAGED}) -> Tensor",
    Facts(over="sequences", invariant=False, kind="", spelled_out=False),
    fake=_fake,
    reference=lightning_indexer_reference,
    cpu=lightning_indexer_reference,
)
