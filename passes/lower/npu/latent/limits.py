"""Limits of the operators of multi-head latent attention: op-plugin docs npu_transpose_batchmatmul,
npu_kv_rmsnorm_rope_cache and npu_mla_prolog_v3."""

from __future__ import annotations

from .....runtime.ops.npu.linear import MAX_PRODUCT_DIM, PRODUCT_MULTIPLE
from ..call import Call

_LATENT, _ROTARY = 512, 64
_HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
_COMPRESSED = (1536, 2048)
_CONTENT = (128, 192)
_POWERS_OF_TWO = tuple(1 << i for i in range(8))
_ROWS_FIRST, _AS_STORED = [1, 0, 2], [0, 1, 2]


def _transposes(call: Call) -> str:
    if call["bias"] is not None or call["scale"] is not None or call["batch_split_factor"] != 1:
        return "bias and scale must be left out, batch_split_factor must be 1"
    order = list(call["perm_x1"] or _AS_STORED)
    if order not in (_AS_STORED, _ROWS_FIRST):
        return f"perm_x1 is {order}; it must be [0, 1, 2] or [1, 0, 2]"
    if list(call["perm_x2"] or _AS_STORED) != _AS_STORED or list(call["perm_y"] or _ROWS_FIRST) != _ROWS_FIRST:
        return "perm_x2 must be [0, 1, 2] and perm_y [1, 0, 2]"
    return ""


def _batched_product(call: Call) -> str:
    x, weight = call.shape("input"), call.shape("weight")
    order = list(call["perm_x1"] or _AS_STORED)
    batch, features = x[order[0]], x[2]
    if batch is None or features is None or (batch, features) != weight[:2]:
        return f"input is {x}, turned by {order}, and weight {weight}"
    columns = weight[2]
    if features % PRODUCT_MULTIPLE or columns is None or columns % PRODUCT_MULTIPLE:
        return f"weight is {weight}; its last two dims must be multiples of {PRODUCT_MULTIPLE}"
    if max(columns, batch, features) > MAX_PRODUCT_DIM:
        return f"weight is {weight}; each dim at most {MAX_PRODUCT_DIM}"
    if order == _ROWS_FIRST and batch * features > MAX_PRODUCT_DIM:
        return f"a row of the input has {batch} * {features} entries; at most {MAX_PRODUCT_DIM} where it is turned"
    return ""


TRANSPOSE_BATCHMATMUL_RULES = (_transposes, _batched_product)


def _norm_and_rotation(call: Call) -> str:
    kv, gamma, cos, sin = (call.shape(name) for name in ("kv", "gamma", "cos", "sin"))
    if kv[1] != 1 or kv[3] != _LATENT + _ROTARY or gamma != (_LATENT,):
        return f"kv is {kv} and gamma {gamma}; [B, 1, S, {_LATENT + _ROTARY}] and [{_LATENT}]"
    if cos != sin or cos != (*kv[:3], _ROTARY):
        return f"cos is {cos} and sin {sin}; both must be [B, 1, S, {_ROTARY}], with B and S of kv"
    for name in ("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v"):
        if call[name] is not None:
            return f"{name} must be left out"
    return ""


def _paged_caches(call: Call) -> str:
    rotated, latent = call.shape("k_cache"), call.shape("ckv_cache")
    if call["cache_mode"] not in ("PA", "PA_BNSD"):
        return f"cache_mode is {call['cache_mode']!r}; it must be 'PA' or 'PA_BNSD'"
    if rotated[2:] != (1, _ROTARY) or latent[2:] != (1, _LATENT) or rotated[:2] != latent[:2]:
        return f"caches are {rotated} and {latent}; [blocks, tokens, 1, {_ROTARY}] and [..., {_LATENT}]"
    size = latent[1]
    return "" if size is not None and size % 16 == 0 else f"blocks of {size}; multiples of 16"


KV_RMSNORM_ROPE_CACHE_RULES = (_norm_and_rotation, _paged_caches)


def _plain_mode(call: Call) -> str:
    zero = (
        "weight_quant_mode",
        "kv_cache_quant_mode",
        "query_quant_mode",
        "ckvkr_repo_mode",
        "quant_scale_repo_mode",
    )
    for name in zero:
        if call[name]:
            return f"{name} is {call[name]}; it must be 0"
    if call["cache_mode"] != "PA_BSND" or call["cache_index"] is None:
        return f"cache_mode is {call['cache_mode']!r}; it must be 'PA_BSND', with cache_index"
    return ""


def _prolog_shapes(call: Call) -> str:
    hidden, compressed = call.shape("weight_dq")
    heads, content, latent = call.shape("weight_uk")
    for what, size, allowed in (
        ("hidden size", hidden, _HIDDEN),
        ("compressed queries", compressed, _COMPRESSED),
        ("heads", heads, _POWERS_OF_TWO),
        ("dims of a head without the rotated ones", content, _CONTENT),
        ("latent", latent, (_LATENT,)),
    ):
        if size not in allowed:
            return f"{what}: {size}; it must be {' or '.join(map(str, allowed))}"
    assert heads is not None and content is not None
    for name, wanted in (
        ("weight_uq_qr", (compressed, heads * (content + _ROTARY))),
        ("weight_dkv_kr", (hidden, _LATENT + _ROTARY)),
        ("rmsnorm_gamma_cq", (compressed,)),
        ("rmsnorm_gamma_ckv", (_LATENT,)),
    ):
        if call.shape(name) != wanted:
            return f"{name} is {call.shape(name)}; it must be {wanted}"
    return ""


def _prolog_tokens(call: Call) -> str:
    tokens, hidden = call.shape("token_x")
    if hidden != call.shape("weight_dq")[0]:
        return f"token_x is {(tokens, hidden)}, weight_dq {call.shape('weight_dq')}"
    for name in ("rope_sin", "rope_cos"):
        if call.shape(name) != (tokens, _ROTARY):
            return f"{name} is {call.shape(name)}; it must be [T, {_ROTARY}]"
    latent, rotated = call.shape("kv_cache"), call.shape("kr_cache")
    if latent[2:] != (1, _LATENT) or rotated[2:] != (1, _ROTARY) or latent[:2] != rotated[:2]:
        return f"caches are {latent} and {rotated}; [blocks, tokens, 1, {_LATENT}] and [..., {_ROTARY}]"
    size = latent[1]
    return "" if size is not None and 16 <= size <= 1024 and size % 16 == 0 else f"blocks of {size}; 16 … 1024, by 16"


PROLOG_RULES = (_plain_mode, _prolog_shapes, _prolog_tokens)
PROLOG_ALIKE = (
    "token_x weight_dq weight_uq_qr weight_uk weight_dkv_kr rmsnorm_gamma_cq rmsnorm_gamma_ckv rope_sin rope_cos "
    "kv_cache kr_cache"
).split()
