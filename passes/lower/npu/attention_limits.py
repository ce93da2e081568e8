"""Limits of the attention operators and of what writes their caches (op-plugin docs of both FIA versions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....runtime.ops.npu import attention_limits
from ....runtime.ops.npu.attention_limits import HEAD_DIM, LATENT_DIM, MAX_SEQUENCES, AttentionSizes
from ...graph.npu_target import Product
from .call import Call

PAGED_SCALES: dict[Product, frozenset[int]] = {Product.A2: frozenset({4, 5}), Product.A3: frozenset({4, 5})}
"""Chip → modes of scales that lie in the blocks of int8 caches (v1: ``key_antiquant_mode``; shapes
and dtype after v2's section on one query per sequence). No document says what other chips do."""
MASK_SIZE = 2048
"""Rows and columns of the mask that the causal and band modes read, whatever the lengths are."""
UNLIMITED = 2147483647
_TOKEN_LAYOUTS = ("TND", "NTD", "TND_NTD", "NTD_TND")


@dataclass(frozen=True)
class Attention:
    """The arguments of npu_fused_infer_attention_score, whose second version has other names for them."""

    heads: int
    kv_heads: int
    layout: str
    sparse_mode: int
    block_size: int
    query_lengths: Any
    kv_lengths: Any
    pre_tokens: int
    next_tokens: int
    inner_precise: int
    wants_lse: bool

    @staticmethod
    def of(call: Call) -> Attention:
        second = call.name.endswith("_v2")
        heads = call["num_query_heads" if second else "num_heads"]
        return Attention(
            heads=heads,
            kv_heads=call["num_key_value_heads"] or heads,
            layout=call["input_layout"],
            sparse_mode=call["sparse_mode"],
            block_size=call["block_size"],
            query_lengths=call["actual_seq_qlen" if second else "actual_seq_lengths"],
            kv_lengths=call["actual_seq_kvlen" if second else "actual_seq_lengths_kv"],
            pre_tokens=call["pre_tokens"],
            next_tokens=call["next_tokens"],
            inner_precise=call["inner_precise"],
            wants_lse=call["return_softmax_lse" if second else "softmax_lse_flag"],
        )

    @property
    def by_token(self) -> bool:
        """Tell whether queries of all sequences lie one after the other."""
        return self.layout in _TOKEN_LAYOUTS


def _heads(call: Call) -> str:
    a = Attention.of(call)
    most = 128 if LATENT_DIM in head_dims(call) else 64  # the section on MLA allows more than the general one
    if a.heads % a.kv_heads or a.heads // a.kv_heads > most or a.heads > 256:
        return f"{a.heads} heads over {a.kv_heads} KV heads; at most {most} to one, 256 in all, and the one divides"
    return ""


def head_dims(call: Call) -> tuple[int | None, int | None, int | None]:
    """Dims of a head of query, key and value."""
    a = Attention.of(call)
    query, key, value = call.shape("query"), call.shape("key"), call.shape("value")
    wide = a.layout.startswith("BSH")
    dim = query[-1] // a.heads if wide and query[-1] is not None else query[-1]

    def of_cache(shape: tuple[int | None, ...]) -> int | None:
        if shape[-1] is None:
            return None
        if call["block_table"] is not None:
            return shape[-1] // a.kv_heads if len(shape) == 3 else shape[-1]
        return shape[-1] // a.kv_heads if wide else shape[-1]

    return dim, of_cache(key), of_cache(value)


def _sizes(call: Call) -> AttentionSizes:
    a = Attention.of(call)
    rope, table = call.shape("query_rope"), call.shape("block_table")
    queries = None if a.by_token else _query_tokens(call, a)
    keys = sequences = None
    if table:
        keys = None if table[1] is None else table[1] * a.block_size
        sequences = table[0]
    elif a.by_token:
        sequences = len(a.query_lengths) if isinstance(a.query_lengths, list | tuple) else None
    else:
        keys = call.shape("key")[2 if a.layout.startswith("BNSD") else 1]
    return AttentionSizes(
        layout=a.layout,
        heads=a.heads,
        kv_heads=a.kv_heads,
        dims=head_dims(call),
        rope_dim=(rope[-1] or 0) if rope else 0,
        sparse_mode=a.sparse_mode,
        wants_lse=a.wants_lse,
        block_size=a.block_size if table else 0,
        queries=queries,
        sequences=sequences if a.by_token else call.shape("query")[0],
        keys=None if a.by_token else keys,
        int8=call.dtype("key") is torch.int8,
    )


def _head_dims(call: Call) -> str:
    return attention_limits.head_dims(_sizes(call))


def _extents(call: Call) -> str:
    return attention_limits.extents(_sizes(call))


def _rope_parts(call: Call) -> str:
    query, key = call.tensor("query_rope"), call.tensor("key_rope")
    if (query is None) != (key is None):
        return "query_rope and key_rope come together or not at all"
    if query is None or key is None:
        return ""
    if call.dtype("query_rope") != call.dtype("query") or call.dtype("key_rope") != call.dtype("key"):
        return "query_rope and key_rope must have the dtypes of query and key"
    return ""


def _paging(call: Call) -> str:
    a = Attention.of(call)
    if call["block_table"] is None:
        return ""
    if a.kv_lengths is None:
        return "paging needs the lengths of keys"
    key = call.shape("key")
    if len(key) == 4 and a.layout not in ("BNSD", "TND", "TND_NTD"):
        return f"a cache [blocks, heads, tokens, dim] is for BNSD and TND queries, not {a.layout}"
    if len(key) not in (3, 4, 5):
        return f"a cache of {len(key)} dims"
    width = key[-1] if len(key) == 3 else None
    if width is not None and width > 65535:
        return f"a row of the cache has {width} entries, more than 65535"
    size = a.block_size
    in_cache = key[1] if len(key) == 3 else key[2] if len(key) == 4 else key[3]
    if in_cache is not None and in_cache != size:
        return f"block_size is {size}, the cache has blocks of {in_cache}"
    return attention_limits.blocks(_sizes(call))


def _query_tokens(call: Call, a: Attention) -> int | None:
    shape = call.shape("query")
    return shape[2] if a.layout.startswith("BNSD") else shape[1]


def _layout(call: Call) -> str:
    a = Attention.of(call)
    if a.layout not in ("BSH", "BSND", "BNSD", "BNSD_BSND", *_TOKEN_LAYOUTS):
        return f"input_layout is {a.layout!r}"
    rank = 3 if a.by_token or a.layout == "BSH" else 4
    query = call.shape("query")
    if len(query) != rank:
        return f"query has {len(query)} dims; {a.layout} has {rank}"
    wide = query[-1] if a.layout == "BSH" else a.heads * (query[-1] or 0)
    if a.layout in ("BSH", "BSND") and wide is not None and wide >= 65535:
        return f"a row of the query has {wide} entries; below 65535 in {a.layout}"
    heads = {"TND": 1, "TND_NTD": 1, "BNSD": 1, "BNSD_BSND": 1, "BSND": 2, "NTD": 0, "NTD_TND": 0}.get(a.layout)
    if heads is not None and query[heads] != a.heads:
        return f"query is {query} in {a.layout}, with {a.heads} heads"
    return ""


def _lengths(call: Call) -> str:
    a = Attention.of(call)
    if a.by_token and (a.query_lengths is None or a.kv_lengths is None):
        return f"{a.layout} needs the lengths of queries and keys"
    return ""


def _mask(call: Call) -> str:
    a = Attention.of(call)
    mask = call.tensor("atten_mask")
    if a.sparse_mode not in (0, 1, 2, 3, 4):
        return f"sparse_mode is {a.sparse_mode}"
    if mask is None:
        return f"sparse_mode {a.sparse_mode} needs a mask" if a.sparse_mode else ""
    if mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        return f"atten_mask is {mask.dtype}; it must be bool, int8 or uint8"
    shape = call.shape("atten_mask")
    if a.sparse_mode in (2, 3, 4):
        fits = shape[-2:] == (MASK_SIZE, MASK_SIZE) and all(size == 1 for size in shape[:-2])
        return "" if fits else f"atten_mask is {shape}; sparse_mode {a.sparse_mode} reads ({MASK_SIZE}, {MASK_SIZE})"
    if a.by_token:
        return f"a mask of its own is not for {a.layout}"
    if len(shape) == 4 and shape[1] != 1:
        return f"atten_mask is {shape}; one for all heads"
    table = call.shape("block_table")
    if not table or _query_tokens(call, a) != 1 or shape[-1] is None:
        return ""
    # The second document has masks of one row for all sequences, too, but the vendor's tiling refuses them
    # (ops-transformer, ``incre_flash_attention_tiling_check.cpp``, ``ProcessAttenMask``).
    if None not in (shape[0], table[0]) and shape[0] != table[0]:
        return f"atten_mask is {shape} for {table[0]} sequences of one query; a row for each"
    if table[1] is not None and shape[-1] < table[1] * a.block_size:
        return f"atten_mask is {shape}; block_table has blocks of {table[1] * a.block_size} tokens"
    return ""


def _precision(call: Call) -> str:
    found = Attention.of(call).inner_precise
    return "" if found in (0, 1, 2, 3) else f"inner_precise is {found}"


def _stored(call: Call) -> str:
    """Keys and values of the dtype of the query, or int8 with float32 scales in their blocks.

    Documents have masks, too, where one query per sequence reads int8 in blocks, and exclude neither beside the other
    but for FRACTAL_NZ; the vendor's kernel computes both, and tests of its tiling give both (ops-transformer,
    ``incre_flash_attention``: ``DealAntiqBmm1ResBaseBlockPerToken``, ``case_kvAntiQuant_unflash_splitB_largeS``).
    """
    second = call.name.endswith("_v2")
    names = [f"dequant_scale_{part}" if second else f"{part}_antiquant_scale" for part in ("key", "value")]
    if call.dtype("key") is not torch.int8:
        if any(call[name] is not None for name in names):
            return f"{' and '.join(names)} are for int8 keys and values"
        same = call.dtype("key") is call.dtype("query")
        return "" if same else f"dtypes differ: query {call.dtype('query')}, key {call.dtype('key')}"
    a = Attention.of(call)
    modes = {call[f"{part}_quant_mode" if second else f"{part}_antiquant_mode"] for part in ("key", "value")}
    known = PAGED_SCALES.get(call.target.product, frozenset())
    if not known:
        return f"no document says that {call.target.soc} reads int8 keys and values with scales in their blocks"
    if call["block_table"] is None or a.by_token or _query_tokens(call, a) != 1:
        return f"int8 keys and values in blocks, with one query per sequence, are what is known; {a.layout} is given"
    if call["query_rope"] is not None or call["pse_shift"] is not None:
        return "rope and biases beside int8 keys and values are not known"
    if a.sparse_mode not in (0, 1):
        return f"sparse_mode is {a.sparse_mode}; it is ignored for one query per sequence: give a mask of its own"
    if len(modes) != 1 or not modes <= known:
        return f"antiquant modes {sorted(modes)} of int8 keys and values; one of {sorted(known)} for both"
    key = call.shape("key")
    (mode,), blocks = modes, (key[0], a.block_size)
    expected = blocks if mode == 4 else (key[0], a.kv_heads, a.block_size)
    for name in names:
        tensor = call.tensor(name)
        dtype = None if tensor is None else tensor.dtype  # never counted as another
        if dtype is not torch.float32 or call.shape(name) != expected:
            return f"{name} is {call.shape(name)} {dtype}; mode {mode} takes {expected} torch.float32"
    return ""


ATTENTION_RULES = (
    _stored,
    _layout,
    _heads,
    _head_dims,
    _rope_parts,
    _lengths,
    _paging,
    _mask,
    _precision,
    _extents,
)


def _sink(call: Call) -> str:
    sink = call.tensor("learnable_sink")
    if sink is None:
        return ""
    a = Attention.of(call)
    if a.layout not in ("TND", "NTD_TND"):
        return f"sinks are for TND and NTD_TND, not {a.layout}"
    value_dim = head_dims(call)[2]
    if value_dim is None or value_dim > HEAD_DIM:
        return f"sinks beside values of {value_dim} dims; at most {HEAD_DIM}"
    if call.dtype("learnable_sink") is not torch.bfloat16 or call.shape("learnable_sink") != (a.heads,):
        return (
            f"learnable_sink is {call.shape('learnable_sink')} {call.dtype('learnable_sink')}; "
            f"({a.heads},) torch.bfloat16"
        )
    return ""


def _packed_without_groups(call: Call) -> str:
    """Refuse in the second version as many KV heads as heads in the packed layouts."""
    a = Attention.of(call)
    if not a.by_token or a.heads != a.kv_heads or head_dims(call)[0] == LATENT_DIM:
        return ""
    allowed = (0, 1) if call.dtype("query") is torch.float16 else (0,)
    if a.inner_precise not in allowed:
        return f"inner_precise is {a.inner_precise} without GQA in {a.layout}; {' or '.join(map(str, allowed))}"
    if a.sparse_mode not in (0, 3, 4) or (a.sparse_mode == 0 and call["atten_mask"] is not None):
        return f"sparse_mode is {a.sparse_mode} without GQA in {a.layout}; 0 without a mask, 3 or 4"
    if call["block_table"] is not None and len(call.shape("key")) != 3:
        return f"a cache of {len(call.shape('key'))} dims without GQA in {a.layout}; [blocks, tokens, heads * dim]"
    return ""


RULES_V2 = (_sink, _packed_without_groups)


def _cache_write(call: Call) -> str:
    key, value = call.shape("key"), call.shape("value")
    key_cache, value_cache = call.shape("key_cache"), call.shape("value_cache")
    if call["cache_mode"] not in ("Norm", "PA_NZ"):
        return f"cache_mode is {call['cache_mode']!r}; say 'Norm' or 'PA_NZ'"
    if call["cache_mode"] == "Norm" and (key_cache[2:] != key[1:] or value_cache[2:] != value[1:]):
        return f"key {key} and value {value} do not fit caches {key_cache} and {value_cache}"
    if key_cache[:2] != value_cache[:2] and None not in key_cache[:2] + value_cache[:2]:
        return f"caches of {key_cache[:2]} and {value_cache[:2]} blocks and tokens"
    return ""


CACHE_WRITE_RULES = (_cache_write,)


def _prompt(call: Call) -> str:
    if call["input_layout"] not in ("BSH", "BSND", "BNSD", "BNSD_BSND"):
        return f"input_layout is {call['input_layout']!r}"
    heads, kv_heads = call["num_heads"], call["num_key_value_heads"] or call["num_heads"]
    if heads % kv_heads or heads // kv_heads > 64 or heads > 256:
        return f"{heads} heads over {kv_heads} KV heads; at most 64 to one, 256 in all, and the one divides"
    query, wide = call.shape("query"), call["input_layout"] == "BSH"
    dim = query[-1] // heads if wide and query[-1] is not None else query[-1]
    if dim is None or dim > LATENT_DIM:
        return f"heads of {dim} dims; at most {LATENT_DIM}"
    if call["input_layout"] in ("BSH", "BSND") and heads * dim >= 65535:
        return f"a row of the query has {heads * dim} entries; below 65535 in {call['input_layout']}"
    most = 128 if dim % 16 or call.target.product is Product.INFERENCE else MAX_SEQUENCES
    if query[0] is not None and query[0] > most:
        return f"{query[0]} sequences; at most {most}"
    if call["sparse_mode"] not in (0, 1, 2, 3, 4):
        return f"sparse_mode is {call['sparse_mode']}"
    if call["sparse_mode"] and call["atten_mask"] is None:
        return f"sparse_mode {call['sparse_mode']} needs a mask"
    if call["sparse_mode"] in (2, 3, 4) and call.shape("atten_mask")[-2:] != (MASK_SIZE, MASK_SIZE):
        return f"sparse_mode {call['sparse_mode']} reads a mask of ({MASK_SIZE}, {MASK_SIZE})"
    return ""


def _prompt_inference_chip(call: Call) -> str:
    if call.target.product is not Product.INFERENCE:
        return ""
    if call["num_key_value_heads"] not in (0, call["num_heads"]):
        return f"{call['num_heads']} heads over {call['num_key_value_heads']} KV heads; no GQA on this chip"
    if call["num_key_value_heads"]:
        return "num_key_value_heads must be left at 0 on this chip"
    if call["sparse_mode"] != 0 or call["pre_tokens"] != UNLIMITED or call["next_tokens"] not in (0, UNLIMITED):
        return f"sparse_mode is {call['sparse_mode']}; 0 on this chip, without a band"
    if call["actual_seq_lengths"] is not None or call["actual_seq_lengths_kv"] is not None:
        return "lengths of sequences are not for this chip"
    tokens = call.shape("query")[2 if call["input_layout"].startswith("BNSD") else 1]
    return f"{tokens} tokens; below 65536 on this chip" if tokens is not None and tokens > 65535 else ""


PROMPT_RULES = (_prompt, _prompt_inference_chip)
