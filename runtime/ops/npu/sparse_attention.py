"""CPU semantics of DeepSeek Sparse Attention: `npu_lightning_indexer` and `npu_sparse_flash_attention`.

Source: op-plugin, docs and golden tests of both names. Where the golden test and the kernel that vllm-ascend carries
differ (``csrc/attention/lightning_indexer``), the kernel is followed, and the docstring says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .limits.sparse_attention import SPARSE_ABSORBED
from .numerics import widened
from .registration import Operator

_ALL = 0
_NONE = -1
_MOST_NUMBERS = 1 << 24
"""Scores, or gathered numbers, that are held at once: 64 MiB."""


def npu_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    actual_seq_lengths_query: torch.Tensor | None,
    actual_seq_lengths_key: torch.Tensor | None,
    block_table: torch.Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query the keys with the highest scores; key j scores ``sum over h of weights[h] · relu(q[h] · k[j])``.

    Args:
        query: ``[T, N, 128]`` ("TND") or ``[B, S, N, 128]`` ("BSND").
        key: ``[blocks, block size, 1, 128]`` ("PA_BSND"), ``[T, 1, 128]`` or ``[B, S, 1, 128]``.
        weights: ``[T, N]`` or ``[B, S, N]``.
        actual_seq_lengths_query: ``[B]`` int32; in "TND" each with those of the sequences before it. Needed there.
        actual_seq_lengths_key: likewise for "TND"; in "PA_BSND" of each sequence. Needed in both.
        block_table: ``[B, W]`` int32, for "PA_BSND".
        sparse_count: K.
        sparse_mode: 3: a query sees no key behind it, where both end together; 0: it sees all.

    Returns:
        ``[T, 1, K]`` or ``[B, S, 1, K]`` int32: positions in the sequence, the best first (of equal ones the first;
        the device's choice is not documented), then -1 where a query sees fewer keys. The golden test has keys there
        that the query does not see; the kernel writes -1. And an empty tensor.

    Raises:
        ValueError: shapes, dtypes, layouts or lengths that do not fit.
        NotImplementedError: ``return_value``.
    """
    lens = actual_seq_lengths_query, actual_seq_lengths_key
    rows, factors = query.flatten(0, -3), weights.flatten(0, -2)
    chosen = torch.full((len(rows), 1, sparse_count), _NONE, dtype=torch.int32, device=query.device)
    for start, end, (keys,) in _sequences(query, (key,), *lens, block_table, layout_query, layout_key):
        seen = torch.arange(len(keys) - (end - start) + 1, len(keys) + 1, device=query.device)
        if sparse_mode == _ALL:
            seen = torch.full_like(seen, len(keys))
        step = max(1, _MOST_NUMBERS // max(1, query.shape[-2] * len(keys)))
        for first in range(start, end, step):
            last = min(end, first + step)
            limits = seen[first - start : last - start, None]
            scores = torch.relu(widened(rows[first:last]) @ widened(keys[:, 0]).T)
            sums = torch.matmul(widened(factors[first:last])[:, None].to(scores.dtype), scores)[:, 0]
            unseen = torch.arange(len(keys), device=query.device) >= limits
            order = sums.masked_fill(unseen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
            count = min(sparse_count, len(keys))
            none = torch.arange(count, device=query.device) >= limits
            chosen[first:last, 0, :count] = order[:, :count].int().masked_fill(none, _NONE)
    return chosen.unflatten(0, query.shape[:-2]), query.new_empty(0)


def _indexer_fake(query: torch.Tensor, sparse_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty((*query.shape[:-2], 1, sparse_count), dtype=torch.int32), query.new_empty(0)


def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    block_table: torch.Tensor | None,
    actual_seq_lengths_query: torch.Tensor | None,
    actual_seq_lengths_kv: torch.Tensor | None,
    query_rope: torch.Tensor | None,
    key_rope: torch.Tensor | None,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent attention over chosen keys: scores of ``[query, query_rope]`` and ``[key, key_rope]``, sums of ``key``.

    Args:
        query: ``[T, N, D]`` ("TND") or ``[B, S, N, D]`` ("BSND"); query_rope: likewise, of R dims. On a device D is
            512 and R is 64.
        key: ``[blocks, block size, 1, D]`` ("PA_BSND"), ``[T, 1, D]`` or ``[B, S, 1, D]``; key_rope likewise.
        value: what ``key`` is; not read.
        sparse_indices: int32 ``[T, 1, K]`` or ``[B, S, 1, K]``, positions in the sequence. From the first -1 on none
            counts.
        scale_value: of the scores.
        block_table, actual_seq_lengths_query, actual_seq_lengths_kv: as for :func:`npu_lightning_indexer`.
        sparse_mode: 3: a chosen key behind the query is not read; 0: it is.
        attention_mode: 2.
        sinks: fp32 ``[N]``, one more score of each head, without a key; on 950 alone.

    Returns:
        like ``query``, zeros where no key is read, and two empty tensors.

    Raises:
        ValueError: shapes, dtypes, layouts, positions or lengths that do not fit.
        NotImplementedError: blocks of several tokens, ``return_softmax_lse``.
    """
    assert query_rope is not None and key_rope is not None
    lens = actual_seq_lengths_query, actual_seq_lengths_kv
    rows = torch.cat((widened(query), widened(query_rope)), -1).flatten(0, -3)
    places, result = sparse_indices.flatten(0, -3)[:, 0], torch.zeros_like(query).flatten(0, -3)
    for start, end, parts in _sequences(query, (key, key_rope), *lens, block_table, layout_query, layout_kv):
        keys = torch.cat([widened(part[:, 0]) for part in parts], -1)
        seen = torch.arange(len(keys) - (end - start), len(keys), device=query.device)
        if sparse_mode == _ALL:
            seen = torch.full_like(seen, len(keys) - 1)
        step = max(1, _MOST_NUMBERS // (places.shape[1] * keys.shape[1]))
        for first in range(start, end, step):
            last = min(end, first + step)
            limits = seen[first - start : last - start, None]
            attended = _attended(
                rows[first:last], keys, places[first:last], limits, scale_value, query.shape[-1], sinks
            )
            result[first:last] = attended.to(query.dtype)
    empty = torch.empty(0, device=query.device)
    return result.unflatten(0, query.shape[:-2]), empty, empty.clone()


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor,
    limits: torch.Tensor,
    scale: float,
    dims: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``[n, N, dims]``: queries ``[n, N, D]`` over those of the keys ``[L, D]`` that stand at ``places [n, K]``, not
    behind ``limits [n, 1]``."""
    read = (places != _NONE).cumprod(-1).bool()
    if bool((read & ((places < 0) | (places >= len(keys)))).any()):
        raise ValueError(
            f"sparse_indices holds {int(places.min())} to {int(places.max())}; the sequence has {len(keys)} keys"
        )
    read &= places <= limits
    chosen = keys[places.long().where(read, 0)].masked_fill(~read[..., None], 0.0)
    scores = (query @ chosen.transpose(1, 2) * scale).masked_fill(~read[:, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks[:, None].to(scores.dtype))
    highest = highest.nan_to_num(neginf=0.0)
    exponentials = torch.exp(scores - highest)
    sums = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        sums = sums + torch.exp(sinks[:, None].to(scores.dtype) - highest)
    return exponentials @ chosen[..., :dims] / sums.where(sums > 0, 1.0)


def _attention_fake(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        query.new_empty(query.shape),
        query.new_empty(0, dtype=torch.float32),
        query.new_empty(0, dtype=torch.float32),
    )


def _sequences(
    query: torch.Tensor,
    keys: tuple[torch.Tensor, ...],
    query_lens: torch.Tensor | None,
    key_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    layout_query: str,
    layout_key: str,
) -> Iterator[tuple[int, int, tuple[torch.Tensor, ...]]]:
    """Of each sequence: its first and last row of the flattened queries, and its keys ``[L, 1, D]`` of each part."""
    paged = layout_key == "PA_BSND"
    ranks = {"BSND": 4, "TND": 3, "PA_BSND": 4}
    if layout_query not in ("BSND", "TND") or layout_key not in (layout_query, "PA_BSND"):
        raise ValueError(f"layout_query is {layout_query!r} and that of keys {layout_key!r}; give one, or PA_BSND")
    if query.dim() != ranks[layout_query] or any(key.dim() != ranks[layout_key] for key in keys):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, *keys))
        raise ValueError(f"query and keys are {shapes}; not {layout_query} and {layout_key}")
    for name, lens, needed in (
        ("query", query_lens, layout_query == "TND"),
        ("key", key_lens, layout_key != "BSND"),
        ("block_table", block_table, paged),
    ):
        if (needed and lens is None) or (lens is not None and lens.dtype is not torch.int32):
            raise ValueError(f"lengths of queries and keys, and the block table, are int32; {name} is not right")
    count = len(query) if query_lens is None else len(query_lens)
    starts, ends = _bounds(query, query_lens, layout_query)
    key_starts, key_ends = (
        ([0] * count, key_lens.tolist()) if paged and key_lens is not None else _bounds(keys[0], key_lens, layout_key)
    )
    if len(key_ends) != count or (block_table is not None and len(block_table) != count):
        raise ValueError(f"there are {count} sequences of queries and {len(key_ends)} of keys")
    for sequence, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first, last = key_starts[sequence], key_ends[sequence]
        if paged:
            assert block_table is not None
            blocks = block_table[sequence, : -(-last // keys[0].shape[1])].long()
            parts = tuple(key[blocks].flatten(0, 1)[:last] for key in keys)
        else:
            parts = tuple(key.flatten(0, -3)[first:last] for key in keys)
        if not start <= end <= query.flatten(0, -3).shape[0] or len(parts[0]) != last - first:
            raise ValueError(
                f"sequence {sequence} has rows {start} to {end} of queries {tuple(query.shape)} and {last - first} "
                f"keys of {tuple(keys[0].shape)}; lengths in TND are sums of those before, and there are no more"
            )
        if end > start:
            yield start, end, parts


def _bounds(x: torch.Tensor, lens: torch.Tensor | None, layout: str) -> tuple[list[int], list[int]]:
    """Where each sequence begins and ends in the flattened rows of ``x``."""
    if layout == "TND":
        assert lens is not None
        ends = lens.tolist()
        return [0, *ends[:-1]], ends
    batch, longest = x.shape[:2]
    counts = [longest] * batch if lens is None else lens.tolist()
    starts = [sequence * longest for sequence in range(batch)]
    return starts, [start + n for start, n in zip(starts, counts, strict=True)]


OPERATORS = (
    Operator("npu_lightning_indexer", npu_lightning_indexer, _indexer_fake),
    Operator(
        "npu_sparse_flash_attention",
        npu_sparse_flash_attention,
        _attention_fake,
        takes={"attention_mode": [SPARSE_ABSORBED]},
        ignores=["value"],
    ),
)
