"""Limits of what multi-head latent attention does before the attention: op-plugin docs npu_kv_rmsnorm_rope_cache and
npu_mla_prolog_v3."""

from __future__ import annotations

from .call import Call
from .rules import A2, A3, A5, BF16, HALF, INT64, Limits, dense, in_reference, lowered, needed, shaped

_LATENT, _ROTARY = 512, 64
_HIDDEN = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
_COMPRESSED = (1536, 2048)
_CONTENT = (128, 192)
_POWERS_OF_TWO = tuple(1 << i for i in range(8))


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


def _parts_of_keys(call: Call) -> str:
    """Norm and rotation of ``kv``, all of which is normalized where ``v`` is given."""
    kv = "kv [B, 1, S, C], v [B, 1, S, V]" if call["v"] is not None else "kv [B, 1, S, C+R]"
    return shaped(f"gamma [C], cos [B, 1, S, R], sin [B, 1, S, R], {kv}")(call)


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


_PROLOG_TENSORS = (
    "token_x [*T, H], weight_dq [H, C], weight_uk [N, D, L], rope_sin [*T, R], rope_cos [*T, R], "
    "weight_uq_qr [C, N*D+N*R], weight_dkv_kr [H, L+R], rmsnorm_gamma_cq [C], rmsnorm_gamma_ckv [L], "
    "kv_cache [B, S, 1, L], kr_cache [B, S, 1, R], cache_index [*T]"
)

LIMITS = {
    "npu_kv_rmsnorm_rope_cache_v2": Limits(
        frozenset({A2, A3}),
        {"kv": HALF, "index": INT64},
        alike=[("kv", "gamma", "cos", "sin", "k_cache", "ckv_cache")],
        mixes=True,
        ranks={"kv": (4,), "gamma": (1,), "cos": (4,)},
        forms={"index": (1,), "k_cache": (4,), "ckv_cache": (4,)},
        rules=[
            lowered(_norm_and_rotation),
            in_reference(_parts_of_keys),
            lowered(_paged_caches),
            dense("kv", "cos", "sin", "k_cache", "ckv_cache"),
        ],
    ),
    "npu_mla_prolog_v3": Limits(
        frozenset({A2, A3, A5}),
        {"token_x": BF16, "cache_index": INT64},
        alike=[
            (
                *("token_x", "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "rmsnorm_gamma_cq"),
                *("rmsnorm_gamma_ckv", "rope_sin", "rope_cos", "kv_cache", "kr_cache"),
            )
        ],
        ranks={"token_x": (2, 3), "weight_dq": (2,), "weight_uk": (3,), "kv_cache": (4,), "kr_cache": (4,)},
        forms={"token_x": (2,)},
        rules=[
            lowered(_plain_mode),
            lowered(_prolog_shapes),
            lowered(_prolog_tokens),
            in_reference(needed("cache_index")),
            in_reference(shaped(_PROLOG_TENSORS)),
            dense("token_x", "rope_sin", "rope_cos", "kv_cache", "kr_cache"),
        ],
    ),
}
