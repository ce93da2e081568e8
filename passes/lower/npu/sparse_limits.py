"""Limits of attention over keys that an indexer chooses: op-plugin docs npu_lightning_indexer and
npu_sparse_flash_attention, and the tiling of the same kernels (vllm-ascend, ``csrc/attention``)."""

from __future__ import annotations

import torch

from ....runtime.ops.npu.sparse_attention import (
    CHOSEN_STEP,
    INDEXER_DIM,
    MAX_CHOSEN,
    MAX_INDEXER_HEADS,
    MOST_CHOSEN,
    SPARSE_ABSORBED,
    SPARSE_LATENT,
    SPARSE_ROPE,
)
from ...graph.npu_target import Product
from .call import Call

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
    if dim != INDEXER_DIM or key[2:] != (1, INDEXER_DIM) or weights != query[:2]:
        return f"query is {query}, key {key}, weights {weights}; one key head, of {INDEXER_DIM} dims"
    if call.target.product is Product.A5:
        if heads in _INDEXER_HEADS_OF_950:
            return ""
        return f"{heads} heads of an indexer; {call.target.soc} takes {' or '.join(map(str, _INDEXER_HEADS_OF_950))}"
    fits = heads is not None and heads <= MAX_INDEXER_HEADS
    return "" if fits else f"{heads} heads of an indexer; at most {MAX_INDEXER_HEADS}"


def _indexer_weights(call: Call) -> str:
    allowed = {call.dtype("query")} | (set() if call.target.product is Product.A5 else {torch.float32})
    dtype = call.dtype("weights")
    return "" if dtype in allowed else f"weights are {dtype}; {' or '.join(sorted(map(str, allowed)))}"


def _chosen_keys(call: Call) -> str:
    count = call["sparse_count"]
    if 0 < count <= MAX_CHOSEN or (count <= MOST_CHOSEN and count % CHOSEN_STEP == 0 and count > 0):
        return ""
    return f"{count} keys are chosen; at most {MAX_CHOSEN}, or a multiple of {CHOSEN_STEP} up to {MOST_CHOSEN}"


INDEXER_RULES = (_paged_tokens, _indexer_heads, _indexer_weights, _chosen_keys)


def _absorbed_heads(call: Call) -> str:
    query, rope, key, key_rope = (call.shape(name) for name in ("query", "query_rope", "key", "key_rope"))
    if (query[2], rope[2:], key[2:], key_rope[2:]) != (
        SPARSE_LATENT,
        (SPARSE_ROPE,),
        (1, SPARSE_LATENT),
        (1, SPARSE_ROPE),
    ):
        return (
            f"a latent of {query[2]} dims with {rope[-1]} rotated ones; it takes {SPARSE_LATENT} and {SPARSE_ROPE} "
            "alone"
        )
    allowed = _HEADS_OF_950 if call.target.product is Product.A5 else _POWERS_OF_TWO
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
    if call.target.product is not Product.A5:
        return f"it knows no sinks on {call.target.soc}, only on {Product.A5.value}"
    heads = call.shape("query")[1]
    fits = sinks.dtype is torch.float32 and call.shape("sinks") == (heads,)
    return "" if fits else f"sinks are {call.shape('sinks')} {sinks.dtype}; ({heads},) torch.float32"


SPARSE_RULES = (_paged_tokens, _absorbed_heads, _sparse_mode, _sinks)
