"""Limits of attention over keys that an indexer chooses: op-plugin docs npu_lightning_indexer and
npu_sparse_flash_attention, and the tiling of the same kernels (vllm-ascend, ``csrc/attention``)."""

from __future__ import annotations

import torch

from .call import Call
from .rules import (
    A2,
    A3,
    A5,
    HALF,
    INT32,
    Limits,
    alike,
    dense,
    given,
    in_reference,
    lowered,
    needed,
    shaped,
    stored_as,
)

_INDEXER_DIM, _MAX_INDEXER_HEADS = 128, 64
_MAX_CHOSEN, _CHOSEN_STEP, _MOST_CHOSEN = 2048, 1024, 8192
"""Keys that the indexer chooses: any number up to the first, then multiples of the second up to the third."""
_SPARSE_LATENT, _SPARSE_ROPE = 512, 64
SPARSE_ABSORBED = 2
"""``attention_mode`` of latent attention, the only one that there is."""
_INDEXER_HEADS_OF_950 = (8, 16, 24, 32, 64)
_POWERS_OF_TWO = tuple(1 << i for i in range(8))
_HEADS_OF_950 = (*range(1, 65), 128)
"""The document has 1 to 128, the tiling these."""


def _paged_tokens(call: Call) -> str:
    """Queries of all sequences one after the other over keys in blocks, with what that needs."""
    second = call.name == "npu_sparse_flash_attention"
    layout = call["layout_kv" if second else "layout_key"]
    if (call["layout_query"], layout) != ("TND", "PA_BSND") or call["sparse_mode"] not in (0, 3):
        given = f"layouts are {call['layout_query']!r} and {layout!r}, sparse_mode is {call['sparse_mode']}"
        return f"{given}; they must be 'TND', 'PA_BSND' and 0 or 3"
    key_lens = "actual_seq_lengths_kv" if second else "actual_seq_lengths_key"
    for name in ("actual_seq_lengths_query", key_lens, "block_table"):
        tensor = call.tensor(name)
        if tensor is None or tensor.dtype is not torch.int32:
            return f"{name} is {None if tensor is None else tensor.dtype}; it must be torch.int32"
    size = call.shape("key")[1]
    return "" if size and 16 <= size <= 1024 and size % 16 == 0 else f"blocks of {size}; 16 … 1024, by 16"


def _indexer_heads(call: Call) -> str:
    query, key, weights = call.shape("query"), call.shape("key"), call.shape("weights")
    heads, dim = query[1:]
    if dim != _INDEXER_DIM or key[2:] != (1, _INDEXER_DIM) or weights != query[:2]:
        return f"query is {query}, key {key}, weights {weights}; one key head, of {_INDEXER_DIM} dims"
    if call.target.product is A5:
        if heads in _INDEXER_HEADS_OF_950:
            return ""
        return f"{heads} heads of an indexer; {call.target.soc} takes {' or '.join(map(str, _INDEXER_HEADS_OF_950))}"
    fits = heads is not None and heads <= _MAX_INDEXER_HEADS
    return "" if fits else f"{heads} heads of an indexer; at most {_MAX_INDEXER_HEADS}"


def _indexer_weights(call: Call) -> str:
    allowed = {call.dtype("query")} | (set() if call.target.product is A5 else {torch.float32})
    dtype = call.dtype("weights")
    return "" if dtype in allowed else f"weights are {dtype}; {' or '.join(sorted(map(str, allowed)))}"


def _chosen_keys(call: Call) -> str:
    count = call["sparse_count"]
    if 0 < count <= _MAX_CHOSEN or (count <= _MOST_CHOSEN and count % _CHOSEN_STEP == 0 and count > 0):
        return ""
    return f"{count} keys are chosen; at most {_MAX_CHOSEN}, or a multiple of {_CHOSEN_STEP} up to {_MOST_CHOSEN}"


def _absorbed_heads(call: Call) -> str:
    query, rope, key, key_rope = (call.shape(name) for name in ("query", "query_rope", "key", "key_rope"))
    if (query[2], rope[2:], key[2:], key_rope[2:]) != (
        _SPARSE_LATENT,
        (_SPARSE_ROPE,),
        (1, _SPARSE_LATENT),
        (1, _SPARSE_ROPE),
    ):
        return (
            f"a latent of {query[2]} dims with {rope[-1]} rotated ones; it takes {_SPARSE_LATENT} and {_SPARSE_ROPE} "
            "alone"
        )
    allowed = _HEADS_OF_950 if call.target.product is A5 else _POWERS_OF_TWO
    if query[1] in allowed:
        return ""
    known = "1 … 64 or 128" if allowed is _HEADS_OF_950 else " or ".join(map(str, allowed))
    return f"{query[1]} heads; {call.target.soc} takes {known}"


def _sparse_mode(call: Call) -> str:
    if call["attention_mode"] != SPARSE_ABSORBED or call["sparse_block_size"] != 1:
        return (
            f"attention_mode is {call['attention_mode']} and sparse_block_size {call['sparse_block_size']}; 2 and 1"
        )
    if call["return_softmax_lse"]:
        return "sums of exponentials are not for graphs"
    indices = call.shape("sparse_indices")
    fits = indices[:2] == (call.shape("query")[0], 1) and indices[2]
    return "" if fits else f"sparse_indices is {indices}; [tokens, 1, keys]"


def _sinks(call: Call) -> str:
    sinks = call.tensor("sinks")
    if sinks is None:
        return ""
    if call.target.product is not A5:
        return f"it knows no sinks on {call.target.soc}, only on {A5.value}"
    heads = call.shape("query")[1]
    fits = sinks.dtype is torch.float32 and call.shape("sinks") == (heads,)
    return "" if fits else f"sinks are {call.shape('sinks')} {sinks.dtype}; ({heads},) torch.float32"


LIMITS = {
    "npu_lightning_indexer": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF},
        alike=[("query", "key")],
        forms={"query": (3,), "key": (4,), "weights": (2,), "block_table": (2,)},
        rules=[
            lowered(_paged_tokens),
            lowered(_indexer_heads),
            lowered(_indexer_weights),
            _chosen_keys,
            in_reference(given("sparse_mode", 0, 3)),
            in_reference(shaped("query [*T, N, D], weights [*T, N], key [*K, 1, D]")),
            in_reference(lambda c: alike("query", "weights")(c) and stored_as("weights", torch.float32)(c)),
            dense("query", "key", "weights"),
        ],
    ),
    "npu_sparse_flash_attention": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF, "sparse_indices": INT32},
        alike=[("query", "key", "value", "query_rope", "key_rope")],
        forms={"query": (3,), "query_rope": (3,), "key": (4,), "key_rope": (4,), "sparse_indices": (3,)},
        rules=[
            lowered(_paged_tokens),
            lowered(_absorbed_heads),
            lowered(_sparse_mode),
            lowered(_sinks),
            in_reference(given("sparse_mode", 0, 3)),
            in_reference(needed("query_rope", "key_rope")),
            in_reference(
                shaped(
                    "query [*T, N, D], query_rope [*T, N, R], sparse_indices [*T, 1, C], sinks [N], "
                    "key [*K, 1, D], value [*K, 1, D], key_rope [*K, 1, R]"
                )
            ),
            in_reference(lambda c: "" if c.shape("sparse_indices")[-1] else "sparse_indices names no keys"),
            in_reference(stored_as("sinks", torch.float32)),
            dense("query", "key", "value", "query_rope", "key_rope", "sparse_indices"),
        ],
    ),
}
