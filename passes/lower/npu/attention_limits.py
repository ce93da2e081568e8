"""Limits of the attention operators and of what writes their caches (op-plugin docs of both FIA versions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .call import Call

MASK_SIZE = 2048
"""Rows and columns of the mask that the causal and band modes read, whatever the lengths are."""
UNLIMITED = 2147483647
_POWERS_OF_TWO = tuple(1 << i for i in range(8))
_TOKEN_LAYOUTS = ("TND", "NTD", "TND_NTD", "NTD_TND")
_HEAD_DIM = 128
_LATENT_DIM = 512


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
        )

    @property
    def by_token(self) -> bool:
        """Whether queries of all sequences lie one after the other."""
        return self.layout in _TOKEN_LAYOUTS


def _heads(call: Call) -> str:
    a = Attention.of(call)
    most = 128 if _LATENT_DIM in head_dims(call) else 64  # the section on MLA allows more than the general one
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


def _head_dims(call: Call) -> str:
    a = Attention.of(call)
    dims = dim, key_dim, value_dim = head_dims(call)
    if dim is None or key_dim is None or value_dim is None:
        return "the size of a head varies"
    with_rope = call["query_rope"] is not None
    paged = call["block_table"] is not None
    if any(d > _LATENT_DIM or d % 16 for d in (dim, key_dim, value_dim)):
        return f"heads of {dims} dims; multiples of 16, at most {_LATENT_DIM}"
    if dim != key_dim:
        return f"heads of {dim} dims in query, {key_dim} in key"
    if _LATENT_DIM in dims:
        if not with_rope:
            return f"heads of {_LATENT_DIM} dims need query_rope and key_rope"
        if a.kv_heads != 1 or a.heads not in _POWERS_OF_TWO or a.sparse_mode not in (0, 3, 4):
            return (
                f"{a.heads} heads over {a.kv_heads} with sparse_mode {a.sparse_mode}: heads of {_LATENT_DIM} dims "
                "are for one KV head, a power of two of at most 128 heads, and sparse_mode 0, 3 or 4"
            )
        return ""
    if a.by_token and with_rope and dims != (_HEAD_DIM,) * 3:
        return f"heads of {dims} dims with rope; {_HEAD_DIM} in this layout"
    if a.by_token and not with_rope:
        grouped = a.heads != a.kv_heads
        if dims in ((128, 128, 128), (192, 192, 128)):
            return ""
        if dims == (192, 192, 192):
            return "heads of 192 dims are not for GQA or paging" if grouped or paged else ""
        if dims == (64, 64, 64):
            return "heads of 64 dims are not for GQA in this layout" if grouped else ""
        return f"heads of {dims} dims; {a.layout} takes 128, 192 (values 128 or 192) and, without GQA, 64"
    if paged and value_dim != dim:
        return f"values of {value_dim} dims beside keys of {dim}, with paging"
    return ""


def _rope_parts(call: Call) -> str:
    query, key = call.tensor("query_rope"), call.tensor("key_rope")
    if (query is None) != (key is None):
        return "query_rope and key_rope come together or not at all"
    if query is None or key is None:
        return ""
    if call.dtype("query_rope") != call.dtype("query") or call.dtype("key_rope") != call.dtype("key"):
        return "query_rope and key_rope must have the dtypes of query and key"
    return "" if query.shape[-1] == 64 else f"query_rope has {query.shape[-1]} dims; it must have 64"


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
    latent = _LATENT_DIM in head_dims(call)
    if a.by_token or latent:
        return "" if 16 <= size <= 1024 and size % 16 == 0 else f"blocks of {size}; multiples of 16 up to 1024"
    if _query_tokens(call, a) == 1:
        return "" if 16 <= size <= 512 and size % 16 == 0 else f"blocks of {size}; multiples of 16 up to 512"
    return "" if size in (128, 256, 384, 512) else f"blocks of {size}; 128, 256, 384 or 512 for several tokens"


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
    return ""


def _precision(call: Call) -> str:
    found = Attention.of(call).inner_precise
    return "" if found in (0, 1, 2, 3) else f"inner_precise is {found}"


def _tokens_of_padded_query(call: Call) -> str:
    size = call.shape("query")
    return "" if not size or size[0] is None or size[0] <= 65536 else f"{size[0]} sequences, more than 65536"


ATTENTION_RULES = (
    _layout,
    _heads,
    _head_dims,
    _rope_parts,
    _lengths,
    _paging,
    _mask,
    _precision,
    _tokens_of_padded_query,
)


def _sink(call: Call) -> str:
    sink = call.tensor("learnable_sink")
    if sink is None:
        return ""
    a = Attention.of(call)
    if a.layout not in ("TND", "NTD_TND"):
        return f"sinks are for TND and NTD_TND, not {a.layout}"
    value_dim = head_dims(call)[2]
    if value_dim is None or value_dim > _HEAD_DIM:
        return f"sinks beside values of {value_dim} dims; at most {_HEAD_DIM}"
    if call.dtype("learnable_sink") is not torch.bfloat16 or call.shape("learnable_sink") != (a.heads,):
        return (
            f"learnable_sink is {call.shape('learnable_sink')} {call.dtype('learnable_sink')}; "
            f"({a.heads},) torch.bfloat16"
        )
    return ""


RULES_V2 = (_sink,)


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
    if heads % kv_heads:
        return f"{heads} heads over {kv_heads} KV heads"
    if call["sparse_mode"] in (2, 3, 4) and call.shape("atten_mask")[-2:] != (MASK_SIZE, MASK_SIZE):
        return f"sparse_mode {call['sparse_mode']} reads a mask of ({MASK_SIZE}, {MASK_SIZE})"
    return ""


PROMPT_RULES = (_prompt,)
