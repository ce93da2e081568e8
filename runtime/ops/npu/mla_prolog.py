"""`npu::npu_mla_prolog_v3`: what multi-head latent attention does before the attention.

Source: op-plugin, doc `torch_npu-npu_mla_prolog_v3.md`, golden test `test_mla_prolog_v3`.
"""

from __future__ import annotations

import sys

import torch

from .kv_cache import write_latent
from .norm import rms_normed
from .numerics import widened
from .registration import Operator
from .rope import deinterleaved, rotated

# cache_mode -> whether the cache holds FRACTAL_NZ
_CACHE_MODES = {"PA_BSND": False, "PA_NZ": True}


def npu_mla_prolog_v3(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    cache_index: torch.Tensor | None,
    rmsnorm_epsilon_cq: float,
    rmsnorm_epsilon_ckv: float,
    cache_mode: str,
    query_norm_flag: bool,
    qc_qr_scale: float,
    kc_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Everything in MLA before the attention, from the hidden states to absorbed queries and the latent cache.

    ``c = rms_norm(x Wdq) · qc_qr_scale``; per head ``[n, r] = c Wuqqr``, ``query = n Wuk``, ``query_rope = rope(r)``;
    ``[l, p] = x Wdkvkr``, ``kv_cache ← rms_norm(l) · kc_scale``, ``kr_cache ← rope(p)``. ``rope`` de-interleaves,
    then rotates halves. Products are summed in fp32 and rounded to bf16, those before a norm or a rotation, too: so
    does the vendor's kernel (ops-transformer, ``mla_prolog_comm.h``, ``MLAPType`` of bf16), and the golden test of
    the first version. (With fp32 or fp64 throughout, which a device does not take, nothing is rounded.)

    Args:
        token_x: bf16 ``[T, He]`` or ``[B, S, He]``, like all the others but ``cache_index``.
        weight_dq: ``[He, Hcq]``; weight_uq_qr: ``[Hcq, N·(D + Dr)]``; weight_uk: ``[N, D, Hckv]``; weight_dkv_kr:
            ``[He, Hckv + Dr]``. FRACTAL_NZ on a device, but for weight_uk.
        rope_sin, rope_cos: ``[T, Dr]`` or ``[B, S, Dr]``; the sine comes first.
        kv_cache, kr_cache: written; ``[blocks, block size, 1, Hckv]`` and ``[…, Dr]``, which in mode "PA_NZ" hold
            ``[blocks, D/16, block size, 16]``.
        cache_index: int64 ``[T]`` or ``[B, S]``, slots; negative: skipped.
        query_norm_flag: whether ``c`` is returned.

    Returns:
        ``query [..., N, Hckv]`` and ``query_rope [..., N, Dr]``, bf16; three results without meaning, of size 1 or 0
        (newer CANN): the scale of ``query``, ``c`` (``[..., Hcq]`` with ``query_norm_flag``) and its scale.

    Raises:
        ValueError: shapes, dtypes or slots that do not fit.
        NotImplementedError: quantized variants, other cache modes.
    """
    heads, _, latent_dim = weight_uk.shape
    rope_dim = rope_sin.shape[-1]
    leading = token_x.shape[:-1]
    assert cache_index is not None
    dtype, tokens = token_x.dtype, token_x.flatten(0, -2)
    sin, cos = rope_sin.reshape(-1, rope_dim), rope_cos.reshape(-1, rope_dim)

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return widened((widened(rows) @ widened(weight)).to(dtype))

    compressed = rms_normed(product(tokens, weight_dq), rmsnorm_gamma_cq, rmsnorm_epsilon_cq) * qc_qr_scale
    compressed = compressed.to(dtype)
    per_head = product(compressed, weight_uq_qr).unflatten(1, (heads, -1))
    content = per_head[..., :-rope_dim]
    query = torch.einsum("tnd,ndl->tnl", content, widened(weight_uk)).to(dtype)
    query_rope = rotated(deinterleaved(per_head[..., -rope_dim:]), cos.unsqueeze(1), sin.unsqueeze(1))

    latent, key_rope = product(tokens, weight_dkv_kr).split([latent_dim, rope_dim], 1)
    latent = rms_normed(latent, rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv) * kc_scale
    key_rope = rotated(deinterleaved(key_rope), cos, sin)
    for name, value, cache in (("kv", latent, kv_cache), ("kr", key_rope, kr_cache)):
        stored = value.to(dtype).unsqueeze(1)
        write_latent(name, stored, cache, cache_index.flatten(), _CACHE_MODES[cache_mode])

    unused = _unused_size()
    normed = compressed.unflatten(0, leading) if query_norm_flag else compressed.new_zeros(unused)
    return (
        query.unflatten(0, leading).contiguous(),
        query_rope.to(dtype).unflatten(0, leading).contiguous(),
        torch.zeros(unused),
        normed,
        torch.zeros(unused),
    )


def _unused_size() -> int:
    # CANN from 8.5 on has empty placeholders; torch_npu's meta function asks for the version, so this must agree.
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None:
        return 1
    return 0 if torch_npu.npu.utils._is_gte_cann_version("8.5.0.alpha003", "CANN") else 1


def _mla_fake(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    rope_sin: torch.Tensor,
    query_norm_flag: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    leading = token_x.shape[:-1]
    unused = [_unused_size()]
    return (
        token_x.new_empty((*leading, weight_uk.shape[0], weight_uk.shape[2])),
        token_x.new_empty((*leading, weight_uk.shape[0], rope_sin.shape[-1])),
        token_x.new_empty(unused, dtype=torch.float32),
        token_x.new_empty((*leading, weight_dq.shape[1]) if query_norm_flag else unused, dtype=weight_uq_qr.dtype),
        token_x.new_empty(unused, dtype=torch.float32),
    )


OPERATORS = (
    Operator(
        "npu_mla_prolog_v3",
        npu_mla_prolog_v3,
        _mla_fake,
        "npu_mla_prolog_v3_functional",
        takes={"cache_mode": tuple(_CACHE_MODES)},
        ignores=["tile_size"],
    ),
)
