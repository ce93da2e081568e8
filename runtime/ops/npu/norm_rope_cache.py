"""`npu::` norm, RoPE and cache write in one: npu_kv_rmsnorm_rope_cache_v2 and npu_qkv_rms_norm_rope_cache.

Source: op-plugin, doc `torch_npu-npu_kv_rmsnorm_rope_cache.md`, golden tests `test_npu_kv_rms_norm_rope_cache` and
`test_npu_qkv_rms_norm_rope_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kv_cache import write_latent, write_slots
from .norm import rms_normed
from .numerics import rounded_to_int8, widened
from .registration import Operator
from .rope import deinterleaved, rotated

_KV_PAGED = {"PA": False, "PA_BNSD": False, "PA_NZ": True}


def npu_kv_rmsnorm_rope_cache_v2(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    k_rope_scale: torch.Tensor | None,
    c_kv_scale: torch.Tensor | None,
    v: torch.Tensor | None,
    epsilon: float,
    cache_mode: str,
    is_output_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA's keys into the cache: the latent part normalized, the other part rotated.

    ``kv = [c, r]``: ``ckv_cache ← rms_norm(c) · gamma``, ``k_cache ← rope(r)``, rope being
    ``q · cos + rotated_half(q) · sin`` of ``q = deinterleaved(r)``. With ``v``: all of ``kv`` is normalized, its
    first ``cos.shape[3]`` columns are rotated, the whole goes to ``k_cache`` and ``v`` to ``ckv_cache``.

    Args:
        kv: ``[B, 1, S, C + R]`` bf16 or fp16 (a device takes C = 512, R = 64; with ``v`` 192 columns).
        gamma: ``[C]``.
        cos, sin: ``[B, 1, S, R]``.
        index: int64. "Norm": ``[B, S]``, positions in each row of the caches. Paged: ``[B·S]`` slots. Negative:
            skipped.
        k_cache, ckv_cache: written; "Norm" ``[B, 1, L, D]``, paged ``[blocks, block size, 1, D]``, which in mode
            "PA_NZ" holds ``[blocks, D/16, block size, 16]`` (32 for int8). The dtype of ``kv``, or int8.
        k_rope_scale, c_kv_scale: fp32 ``[D]`` for int8 caches: ``rint(value · scale)``.
        v: ``[B, 1, S, Dv]``.
        is_output_kv: whether what was written is returned, unquantized; else undefined on a device, NaN here.

    Returns:
        ``[B, 1, S, R]`` and ``[B, 1, S, C]`` (with ``v``: the shapes of ``kv`` and ``v``) in the dtype of ``kv``.

    Raises:
        ValueError: shapes, dtypes or slots that do not fit.
        NotImplementedError: quantization offsets, the PA_BLK modes, cache dtypes by number.
    """
    normalized = gamma.shape[0]
    rope_dim = cos.shape[-1]
    wide = widened(kv)
    if v is None:
        latent = rms_normed(wide[..., :normalized], gamma, epsilon)
        key = rotated(deinterleaved(wide[..., normalized:]), cos, sin)
    else:
        normed = rms_normed(wide, gamma, epsilon)
        key = torch.cat([rotated(deinterleaved(normed[..., :rope_dim]), cos, sin), normed[..., rope_dim:]], -1)
        latent = widened(v)
    for name, value, cache, scale in (("k", key, k_cache, k_rope_scale), ("ckv", latent, ckv_cache, c_kv_scale)):
        stored = _stored(name, value if scale is None else value * scale, cache, scale, kv.dtype)
        if cache_mode == "Norm":
            _write_rows(name, stored, cache, index)
        else:
            write_latent(name, stored[:, 0].flatten(0, 1).unsqueeze(1), cache, index, _KV_PAGED[cache_mode])
    if not is_output_kv:
        return kv.new_full(key.shape, float("nan")), kv.new_full(latent.shape, float("nan"))
    # latent may be the argument v itself.
    return key.to(kv.dtype).contiguous(), latent.to(kv.dtype, copy=True).contiguous()


def npu_qkv_rms_norm_rope_cache(
    qkv: torch.Tensor,
    q_gamma: torch.Tensor,
    k_gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qkv_size: Sequence[int],
    head_nums: Sequence[int],
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    epsilon: float,
    is_output_qkv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-head RMS norm and half RoPE of queries and keys; keys and values into FRACTAL_NZ caches (Qwen3).

    Args:
        qkv: ``[B·S, (Nq + Nk + Nv)·D]``.
        q_gamma, k_gamma: ``[D]``.
        cos, sin: ``[B·S, D]``.
        index: int64 ``[B·S]`` slots; negative: skipped.
        q_out: written, ``[B·S, Nq·D]``.
        k_cache, v_cache: written, ``[blocks, N·D/16, block size, 16]`` (32 for int8).
        qkv_size: ``[B, S, Nq + Nk + Nv, D]``.
        head_nums: ``[Nq, Nk, Nv]``.
        k_scale, v_scale: fp32 ``[N, D]`` for int8 caches: ``rint(value / scale)``. (The sister operator
            npu_kv_rmsnorm_rope_cache multiplies.)
        is_output_qkv: whether queries, keys and values are returned, unquantized.

    Returns:
        ``[B·S, N·D]`` each in the dtype of ``qkv``; without ``is_output_qkv`` three scalars without meaning.

    Raises:
        ValueError: shapes, dtypes or slots that do not fit.
        NotImplementedError: quantization offsets, other cache modes.
    """
    batch, length, heads, dim = qkv_size
    tokens = batch * length
    if sum(head_nums) != heads or qkv.shape != (tokens, heads * dim):
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}, qkv_size is {list(qkv_size)} and head_nums {list(head_nums)}; they "
            "must be [B*S, N*D], [B, S, N, D] and three numbers of heads that make N"
        )
    if cos.shape != (tokens, dim) or sin.shape != cos.shape or q_gamma.shape != (dim,) or k_gamma.shape != (dim,):
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}, q_gamma {tuple(q_gamma.shape)}, k_gamma "
            f"{tuple(k_gamma.shape)}; they must be [{tokens}, {dim}] twice and [{dim}] twice"
        )
    query, key, value = widened(qkv).unflatten(1, (heads, dim)).split(list(head_nums), 1)
    query = rotated(rms_normed(query, q_gamma, epsilon), cos.unsqueeze(1), sin.unsqueeze(1))
    key = rotated(rms_normed(key, k_gamma, epsilon), cos.unsqueeze(1), sin.unsqueeze(1))
    q_out.copy_(query.flatten(1))
    for name, part, cache, scale in (("k", key, k_cache, k_scale), ("v", value, v_cache, v_scale)):
        stored = _stored(name, part if scale is None else part / scale, cache, scale, qkv.dtype)
        write_slots(name, stored, cache, index, nz=True)
    if not is_output_qkv:
        return qkv.new_zeros(()), qkv.new_zeros(()), qkv.new_zeros(())
    outputs = [part.flatten(1).to(qkv.dtype, copy=True).contiguous() for part in (query, key, value)]
    return outputs[0], outputs[1], outputs[2]


def _stored(
    name: str, value: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if (cache.dtype is torch.int8) != (scale is not None) or (scale is None and cache.dtype is not dtype):
        raise ValueError(
            f"{name}_cache has dtype {cache.dtype} and its scale is {'missing' if scale is None else 'given'}; a "
            f"cache is int8 with a scale or {dtype} without one"
        )
    return value.to(dtype) if scale is None else rounded_to_int8(value)


def _write_rows(name: str, value: torch.Tensor, cache: torch.Tensor, index: torch.Tensor) -> None:
    # value: [B, 1, S, D], cache: [B, 1, L, D], index: [B, S]
    batch, _, length, dim = value.shape
    if cache.dim() != 4 or cache.shape[:2] != (batch, 1) or cache.shape[3] != dim or index.shape != (batch, length):
        raise ValueError(
            f"{name}_cache has shape {tuple(cache.shape)} and index {tuple(index.shape)}; they must be [{batch}, 1, "
            f"L, {dim}] and [{batch}, {length}]"
        )
    if index.numel() and int(index.max()) >= cache.shape[2]:
        raise ValueError(f"index holds {int(index.max())}; {name}_cache has {cache.shape[2]} places in a row")
    rows, columns = (index >= 0).nonzero(as_tuple=True)
    cache[rows, 0, index[rows, columns].long()] = value[rows, 0, columns]


def _kv_fake(
    kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, v: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    key_dim, latent_dim = (cos.shape[3], gamma.shape[0]) if v is None else (kv.shape[3], v.shape[3])
    return kv.new_empty((*kv.shape[:3], key_dim)), kv.new_empty((*kv.shape[:3], latent_dim))


def _qkv_fake(
    qkv: torch.Tensor, qkv_size: Sequence[int], head_nums: Sequence[int], is_output_qkv: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = [(qkv.shape[0], heads * qkv_size[3]) if is_output_qkv else () for heads in head_nums]
    return qkv.new_empty(shapes[0]), qkv.new_empty(shapes[1]), qkv.new_empty(shapes[2])


OPERATORS = (
    Operator(
        "npu_kv_rmsnorm_rope_cache_v2",
        npu_kv_rmsnorm_rope_cache_v2,
        _kv_fake,
        "npu_kv_rmsnorm_rope_cache_v2_functional",
        takes={"cache_mode": ("Norm", *_KV_PAGED)},
    ),
    Operator(
        "npu_qkv_rms_norm_rope_cache",
        npu_qkv_rms_norm_rope_cache,
        _qkv_fake,
        "npu_qkv_rms_norm_rope_cache_functional",
    ),
)
