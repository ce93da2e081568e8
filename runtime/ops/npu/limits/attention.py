"""Limits of the attention operators (op-plugin docs of both FIA versions, of PFA and of IFA)."""

from __future__ import annotations

import torch

from ..attention_layouts import parse_layout
from ..numerics import nz_width
from . import attention_sizes
from .attention_sizes import HEAD_DIM, LATENT_DIM, MAX_SEQUENCES, AttentionSizes
from .call import Call
from .incremental_attention import paged_queries
from .rules import A2, A3, A5, HALF, INFERENCE, INT32, Limits, dense, given, in_reference, lowered, shaped

PAGED_SCALES = {A2: frozenset({4, 5}), A3: frozenset({4, 5})}
"""Chip → modes of scales that lie in the blocks of int8 caches (v1: ``key_antiquant_mode``; shapes
and dtype after v2's section on one query per sequence). No document says what other chips do."""
MASK_SIZE = 2048
"""Rows and columns of the mask that the causal and band modes read, whatever the lengths are."""
UNLIMITED = 2147483647


def _by_token(call: Call) -> bool:
    """Tell whether queries of all sequences lie one after the other."""
    return "T" in call["input_layout"]


def _is_wide(call: Call) -> bool:
    """Tell whether the heads of a token lie in one dim."""
    return str(call["input_layout"]).startswith("BSH")


def _kv_heads(call: Call) -> int:
    return int(call["kv_heads"] or call["heads"])


def _heads(call: Call) -> str:
    heads, kv_heads = call["heads"], _kv_heads(call)
    # The section on MLA allows more than the general one.
    most = 128 if LATENT_DIM in _head_dims(call) and call.is_given("query_rope") else 64
    if heads < 1 or heads % kv_heads or heads // kv_heads > most or heads > 256:
        return f"{heads} heads over {kv_heads} KV heads; at most {most} to one, 256 in all, and the one divides"
    return ""


def _head_dims(call: Call) -> tuple[int | None, int | None, int | None]:
    """Dims of a head of query, key and value."""
    query, wide, kv_heads = call.shape("query"), _is_wide(call), max(1, _kv_heads(call))

    def of_cache(shape: tuple[int | None, ...]) -> int | None:
        last, columns = shape[-1], shape[2] if len(shape) == 5 else 1
        if last is None or columns is None:
            return None
        is_split = len(shape) == 3 and (wide or call.is_given("block_table"))
        return last // kv_heads if is_split else last * columns

    dim = query[-1] // max(1, call["heads"]) if wide and query[-1] is not None else query[-1]
    return dim, of_cache(call.shape("key")), of_cache(call.shape("value"))


def _query_tokens(call: Call) -> int | None:
    shape = call.shape("query")
    return shape[2] if call["input_layout"].startswith("BNSD") else shape[1]


def _sizes(call: Call) -> AttentionSizes:
    rope, table, key = call.shape("query_rope"), call.shape("block_table"), call.shape("key")
    by_token, lengths = _by_token(call), call["query_lengths"]
    sequences = call.shape("query")[0]
    if by_token:
        sequences = table[0] if table else len(lengths) if isinstance(lengths, list | tuple) else None
    keys = key[2 if call["input_layout"].startswith("BNSD") else 1]
    if table:
        keys = None if table[1] is None else table[1] * call["block_size"]
    is_nz = call.dtype("key") is torch.int8 and len(key) == 5  # which has blocks of its own sizes
    return AttentionSizes(
        layout=call["input_layout"],
        heads=call["heads"],
        kv_heads=_kv_heads(call),
        dims=_head_dims(call),
        rope_dim=(rope[-1] or 0) // (call["heads"] if _is_wide(call) else 1) if rope else 0,
        sparse_mode=call["sparse_mode"],
        wants_lse=call["want_lse"],
        block_size=call["block_size"] if table and not is_nz else 0,
        queries=None if by_token else _query_tokens(call),
        sequences=sequences,
        keys=None if by_token else keys,
        int8=call.dtype("key") is torch.int8,
        cann=call.target.cann_release,
    )


def _sizes_of_heads(call: Call) -> str:
    return attention_sizes.head_dims(_sizes(call))


def _extents(call: Call) -> str:
    return attention_sizes.extents(_sizes(call))


def _alike_heads(call: Call) -> str:
    """What the size of a head is limited by in npu_prompt_flash_attention and npu_incre_flash_attention."""
    query, key, _ = _head_dims(call)
    return "" if query == key else f"heads of {query} dims in query, {key} in key"


def _rope_parts(call: Call) -> str:
    query, key = call.tensor("query_rope"), call.tensor("key_rope")
    if (query is None) != (key is None):
        return "query_rope and key_rope come together or not at all"
    if query is None or key is None:
        return ""
    is_rounded = call.is_reference and call.dtype("key") is torch.int8
    if call.dtype("query_rope") != call.dtype("query") or (
        call.dtype("key_rope") != call.dtype("key") and not is_rounded
    ):
        return "query_rope and key_rope must have the dtypes of query and key"
    return ""


def _paging(call: Call) -> str:
    if not call.is_given("block_table"):
        return ""
    layout, size, kv_heads = call["input_layout"], call["block_size"], _kv_heads(call)
    if not call["kv_lengths"]:
        return "paging needs the lengths of keys"
    if size < 1:
        return f"block_size is {size}; paging needs the size of a block"
    rank = len(call.shape("key"))
    for name in ("key", "value", "key_rope"):
        if not call.is_given(name):
            continue
        shape = call.shape(name)
        if len(shape) != rank:
            return f"{name} has {len(shape)} dims and key {rank}; page both in one format"
        if rank == 4 and layout.partition("_")[0] not in ("BNSD", "TND"):
            return f"a cache [blocks, heads, tokens, dim] is for BNSD and TND queries, not {layout}"
        if rank == 5 and not _reads_nz(call, name):
            return f"a cache {shape} of 5 dims; FRACTAL_NZ is for int8 and for MLA with heads of {LATENT_DIM}"
        if rank == 3 and shape[2] is not None and shape[2] > 65535:
            return f"a row of the cache has {shape[2]} entries, more than 65535"
        in_cache = shape[rank - 2]
        if in_cache is not None and in_cache != size:
            return f"block_size is {size}, the cache has blocks of {in_cache}"
        heads = shape[1] if rank > 3 else shape[2]
        if heads is not None and (heads % kv_heads if rank == 3 else heads != kv_heads):
            return (
                f"{name} is {shape}, with {kv_heads} KV heads; a paged cache is [blocks, tokens, heads * dim] (view "
                "[blocks, tokens, heads, dim] as that), or [blocks, heads, tokens, dim]"
            )
    return ""


def _blocks(call: Call) -> str:
    return attention_sizes.blocks(_sizes(call))


def _reads_nz(call: Call, name: str) -> bool:
    """Tell whether FRACTAL_NZ is read for such heads and dtypes, and whether a cache has its columns."""
    tensor = call.tensor(name)
    reads = call.dtype("key") is torch.int8 or (call.is_given("query_rope") and _head_dims(call)[0] == LATENT_DIM)
    return tensor is not None and reads and tensor.shape[4] == nz_width(tensor.dtype)


def _layout(call: Call) -> str:
    layout, count = call["input_layout"], call["heads"]
    if layout not in ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND", "NTD", "TND_NTD", "NTD_TND"):
        return f"input_layout is {layout!r}"
    rank = 3 if _by_token(call) or layout == "BSH" else 4
    query = call.shape("query")
    if len(query) != rank:
        return f"query has {len(query)} dims; {layout} has {rank}"
    wide = query[-1] if layout == "BSH" else count * (query[-1] or 0)
    if layout in ("BSH", "BSND") and wide is not None and wide >= 65535:
        return f"a row of the query has {wide} entries; below 65535 in {layout}"
    heads = {"TND": 1, "TND_NTD": 1, "BNSD": 1, "BNSD_BSND": 1, "BSND": 2, "NTD": 0, "NTD_TND": 0}.get(layout)
    if heads is not None and query[heads] != count:
        return f"query is {query} in {layout}, with {count} heads"
    return ""


def _layout_of_reference(call: Call) -> str:
    """As :func:`parse_layout` raises, or where query and key do not fit the layout."""
    query, key, heads = call.tensor("query"), call.tensor("key"), call["heads"]
    assert query is not None and key is not None
    layout = parse_layout(call["input_layout"], query)
    if layout.inputs == "BSH" and query.shape[2] % max(1, heads):
        return f"query is {tuple(query.shape)}; {heads} heads do not divide its last dim"
    if layout.inputs != "BSH" and layout.heads_first(query, heads).shape[-3] != heads:
        return f"query is {tuple(query.shape)} in {layout.name}, with {heads} heads"
    if not call.is_given("block_table") and key.dim() != query.dim():
        return f"query is {tuple(query.shape)} and key {tuple(key.shape)}; without a block table they have one layout"
    return ""


def _lengths(call: Call) -> str:
    if _by_token(call) and (call["query_lengths"] is None or call["kv_lengths"] is None):
        return f"{call['input_layout']} needs the lengths of queries and keys"
    return ""


def _mask(call: Call) -> str:
    layout, mode, size = call["input_layout"], call["sparse_mode"], call["block_size"]
    mask = call.tensor("atten_mask")
    if mode not in (0, 1, 2, 3, 4):
        return f"sparse_mode is {mode}"
    if mask is None:
        return f"sparse_mode {mode} needs a mask" if mode else ""
    if mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        return f"atten_mask is {mask.dtype}; it must be bool, int8 or uint8"
    shape = call.shape("atten_mask")
    if mode in (2, 3, 4):
        fits = shape[-2:] == (MASK_SIZE, MASK_SIZE) and all(n == 1 for n in shape[:-2])
        return "" if fits else f"atten_mask is {shape}; sparse_mode {mode} reads ({MASK_SIZE}, {MASK_SIZE})"
    if _by_token(call):
        return f"a mask of its own is not for {layout}"
    if len(shape) == 4 and shape[1] != 1:
        return f"atten_mask is {shape}; one for all heads"
    table, queries = call.shape("block_table"), _query_tokens(call)
    rows = queries if len(shape) == 2 and queries == 1 else shape[-2]
    if rows is not None and queries is not None and not queries <= rows <= -(-queries // 32) * 32:
        return f"atten_mask is {shape} for {queries} queries a sequence; a row for each, filled up to 32 at most"
    if not table or queries != 1 or shape[-1] is None:
        return ""
    # The second document has masks of one row for all sequences, too, but the vendor's tiling refuses them
    # (ops-transformer, ``incre_flash_attention_tiling_check.cpp``, ``ProcessAttenMask``).
    if None not in (shape[0], table[0]) and shape[0] != table[0]:
        return f"atten_mask is {shape} for {table[0]} sequences of one query; a row for each"
    if table[1] is not None and shape[-1] < table[1] * size:
        return f"atten_mask is {shape}; block_table has blocks of {table[1] * size} tokens"
    return ""


def _one_query(call: Call) -> str:
    """Refuse what documents call invalid for one query per sequence without rope: ``sparse_mode``, ``pre_tokens``,
    ``next_tokens`` and the lengths of queries (op-plugin and CANN's V3 and V4, parameters and "Q_S = 1").

    CANN's tiling sets ``sparse_mode`` to 0 and keeps the mask (``FiaInfoParser::GetUpdateInfo``; the older kernel for
    single queries does so, too), so that the compressed mask is read as one of the keys: its first row hides all but
    the first. A full mask is what modes 0 and 1 read.
    """
    if _by_token(call) or _query_tokens(call) != 1 or call.is_given("query_rope"):
        return ""
    mode, remedy = call["sparse_mode"], "use TND, two rows of queries for each sequence, or a mask for the keys"
    if mode not in (0, 1):
        return (
            f"sparse_mode is {mode}, which is invalid for one query per sequence in {call['input_layout']}; {remedy}"
        )
    if call.is_reference:
        return ""  # which refuses windows and lengths where they would matter
    for name, default in (("pre_tokens", UNLIMITED), ("next_tokens", UNLIMITED), ("query_lengths", None)):
        if call[name] != default:
            given_ = call.own(name)
            return (
                f"{given_} is given, which is invalid for one query per sequence in {call['input_layout']}; {remedy}"
            )
    return ""


def _packed(call: Call) -> str:
    """Limits of the packed layouts without latent heads (both documents, "TND"; V3 and V4, "MHA" and "GQA"): masks,
    precision, and caches ``[blocks, tokens, heads * dim]`` alone."""
    layout, mode, precise = call["input_layout"], call["sparse_mode"], call["inner_precise"]
    if not _by_token(call) or LATENT_DIM in _head_dims(call):
        return ""
    is_mha, is_fp16 = call["heads"] == _kv_heads(call), call.dtype("query") is torch.float16
    allowed = (0, 1) if is_mha and is_fp16 else (0,)
    if precise not in allowed:
        return f"inner_precise is {precise} in {layout}; {' or '.join(map(str, allowed))}"
    if mode not in (0, 3, 4):
        return f"sparse_mode is {mode} in {layout}; 0 without a mask, 3 or 4"
    # The first version's document has [blocks, heads, tokens, dim] in its table of paging, too; no other one does.
    if not call.is_reference and call["block_table"] is not None and len(call.shape("key")) != 3:
        return f"a cache of {len(call.shape('key'))} dims in {layout}; [blocks, tokens, heads * dim]"
    return ""


def _precision(call: Call) -> str:
    found, highest = call["inner_precise"], 1 if not _by_token(call) and _query_tokens(call) == 1 else 3
    return "" if 0 <= found <= highest else f"inner_precise is {found}; 0 to {highest}"


def _stored(call: Call) -> str:
    """Keys and values of the dtype of the query, or int8 with float32 scales in their blocks.

    Documents have masks, too, where one query per sequence reads int8 in blocks, and exclude neither beside the other
    but for FRACTAL_NZ; the vendor's kernel computes both, and tests of its tiling give both (ops-transformer,
    ``incre_flash_attention``: ``DealAntiqBmm1ResBaseBlockPerToken``, ``case_kvAntiQuant_unflash_splitB_largeS``).
    """
    names = ("key_scale", "value_scale")
    if call.dtype("key") is not torch.int8:
        if call.is_given(*names) or (call.is_reference and call.is_given("stacked_scale")):
            return f"{' and '.join(map(call.own, names))} are for int8 keys and values"
        same = call.dtype("key") is call.dtype("query")
        return "" if same else f"dtypes differ: query {call.dtype('query')}, key {call.dtype('key')}"
    if call.is_reference:
        return ""  # which knows all modes, and refuses by itself
    modes = {call["key_mode"], call["value_mode"]}
    known = PAGED_SCALES.get(call.target.product, frozenset())
    if not known:
        return f"no document says that {call.target.soc} reads int8 keys and values with scales in their blocks"
    if call["block_table"] is None or _by_token(call) or _query_tokens(call) != 1:
        given_layout = call["input_layout"]
        return (
            f"int8 keys and values in blocks, with one query per sequence, are what is known; {given_layout} is given"
        )
    if call["query_rope"] is not None or call["pse_shift"] is not None:
        return "rope and biases beside int8 keys and values are not known"
    if len(modes) != 1 or not modes <= known:
        return f"antiquant modes {sorted(modes)} of int8 keys and values; one of {sorted(known)} for both"
    key = call.shape("key")
    (mode,), blocks = modes, (key[0], call["block_size"])
    expected = blocks if mode == 4 else (key[0], _kv_heads(call), call["block_size"])
    for name in names:
        tensor = call.tensor(name)
        dtype = None if tensor is None else tensor.dtype  # never counted as another
        if dtype is not torch.float32 or call.shape(name) != expected:
            return f"{call.own(name)} is {call.shape(name)} {dtype}; mode {mode} takes {expected} torch.float32"
    return ""


def _sink(call: Call) -> str:
    sink = call.tensor("sinks")
    if sink is None:
        return ""
    if call["input_layout"] not in ("TND", "NTD_TND"):
        return f"sinks are for TND and NTD_TND, not {call['input_layout']}"
    value_dim = _head_dims(call)[2]
    if value_dim is None or value_dim > HEAD_DIM:
        return f"sinks beside values of {value_dim} dims; at most {HEAD_DIM}"
    # bf16 is the device's only dtype; a reference that compares in fp32 has its sinks in fp32 too.
    dtype, heads = call.dtype("sinks"), call["heads"]
    is_known = dtype is torch.bfloat16 or (call.is_reference and call.is_half(dtype) and dtype is call.dtype("query"))
    if not is_known or dtype is torch.float16 or call.shape("sinks") != (heads,):
        return f"learnable_sink is {call.shape('sinks')} {dtype}; ({heads},) torch.bfloat16"
    return ""


def _prompt(call: Call) -> str:
    layout, mode = call["input_layout"], call["sparse_mode"]
    if layout not in ("BSH", "BSND", "BNSD", "BNSD_BSND"):
        return f"input_layout is {layout!r}"
    heads, kv_heads = call["heads"], _kv_heads(call)
    if heads % kv_heads or heads // kv_heads > 64 or heads > 256:
        return f"{heads} heads over {kv_heads} KV heads; at most 64 to one, 256 in all, and the one divides"
    query, wide = call.shape("query"), layout == "BSH"
    dim = query[-1] // heads if wide and query[-1] is not None else query[-1]
    if dim is None or dim > LATENT_DIM:
        return f"heads of {dim} dims; at most {LATENT_DIM}"
    if layout in ("BSH", "BSND") and heads * dim >= 65535:
        return f"a row of the query has {heads * dim} entries; below 65535 in {layout}"
    most = 128 if dim % 16 or call.target.product is INFERENCE else MAX_SEQUENCES
    if query[0] is not None and query[0] > most:
        return f"{query[0]} sequences; at most {most}"
    if mode not in (0, 1, 2, 3, 4):
        return f"sparse_mode is {mode}"
    if mode and call["atten_mask"] is None:
        return f"sparse_mode {mode} needs a mask"
    if mode in (2, 3, 4) and call.shape("atten_mask")[-2:] != (MASK_SIZE, MASK_SIZE):
        return f"sparse_mode {mode} reads a mask of ({MASK_SIZE}, {MASK_SIZE})"
    return ""


def _prompt_inference_chip(call: Call) -> str:
    if call.target.product is not INFERENCE:
        return ""
    if call["kv_heads"] not in (0, call["heads"]):
        return f"{call['heads']} heads over {call['kv_heads']} KV heads; no GQA on this chip"
    if call["kv_heads"]:
        return "num_key_value_heads must be left at 0 on this chip"
    if call["sparse_mode"] != 0 or call["pre_tokens"] != UNLIMITED or call["next_tokens"] not in (0, UNLIMITED):
        return f"sparse_mode is {call['sparse_mode']}; 0 on this chip, without a band"
    if call["query_lengths"] is not None or call["kv_lengths"] is not None:
        return "lengths of sequences are not for this chip"
    tokens = call.shape("query")[2 if call["input_layout"].startswith("BNSD") else 1]
    return f"{tokens} tokens; below 65536 on this chip" if tokens is not None and tokens > 65535 else ""


_RANKS = {"block_table": (2,), "query": (3, 4), "key": (3, 4, 5), "value": (3, 4, 5)}
_RULES = (
    _stored,
    lowered(_layout),
    in_reference(_layout_of_reference),
    _heads,
    _sizes_of_heads,
    _rope_parts,
    in_reference(shaped("query [*T, D], query_rope [*T, R]")),
    lowered(_lengths),
    _paging,
    _blocks,
    lowered(_mask),
    in_reference(given("sparse_mode", 0, 1, 2, 3, 4, 9)),
    _one_query,
    _packed,
    _precision,
    _extents,
    dense(
        *("query", "key", "value", "query_rope", "key_rope", "atten_mask", "pse_shift", "key_scale", "value_scale")
    ),
)

LIMITS = {
    "npu_fused_infer_attention_score": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF, "block_table": INT32},
        alike=[("key", "value")],
        ranks=_RANKS,
        rules=_RULES,
    ),
    "npu_fused_infer_attention_score_v2": Limits(
        frozenset({A2, A3, A5}),
        {"query": HALF, "block_table": INT32},
        alike=[("key", "value")],
        ranks=_RANKS,
        rules=[*_RULES, _sink],
    ),
    "npu_prompt_flash_attention": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"query": HALF},
        alike=[("query", "key", "value")],
        ranks=_RANKS,
        rules=[
            lowered(_prompt),
            lowered(_prompt_inference_chip),
            in_reference(given("input_layout", "BSH", "BSND", "BNSD", "BNSD_BSND", "TND")),
            in_reference(_layout_of_reference),
            in_reference(_heads),
            in_reference(_alike_heads),
            in_reference(given("sparse_mode", 0, 1, 2, 3, 4, 9)),
            dense("query", "key", "value", "atten_mask", "pse_shift"),
        ],
    ),
    "npu_incre_flash_attention": Limits(
        frozenset({INFERENCE}),
        {"query": HALF, "block_table": INT32},
        alike=[("key", "value")],
        ranks=_RANKS,
        rules=[
            _stored,
            given("input_layout", "BSH", "BSND", "BNSD"),
            _layout_of_reference,
            _heads,
            _alike_heads,
            _paging,
            _precision,
            lowered(paged_queries),
        ],
    ),
}
