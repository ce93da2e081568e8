"""Limits of npu_fused_infer_attention_score and its second version, as their documents state them.

Where releases of CANN differ, the source is CANN's ops-transformer at the tag of the release: the documents
``aclnnFusedInferAttentionScoreV3.md`` (the operator) and ``…V4.md`` (its second version), for A2 and A3 the parts
"TND", "GQA" and "MHA", and the tiling, ``fused_infer_attention_score_tiling_v3.cpp``. Documents of 8.5 know some of
9.0's sizes, but its tiling refuses them beside windows and without GQA, and users were refused them altogether
(vllm-ascend, pull request 9632): what 9.0 added is for 9.0 and later.

The reference kernels refuse by them, and so does lowering before it emits a call. Each function says why a call is
not legal; "" when it is. A size that is None varies and passes.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM, LATENT_DIM, ROPE_DIM = 128, 512, 64
MAX_SEQUENCES, MAX_PACKED_SEQUENCES = 65536, 4096
MAX_DECODE_CONTEXT = 262144
LATENT_HEADS = tuple(1 << i for i in range(8))
PACKED_DIM, WIDE_HEADS = 256, (9, 0)
"""The most dims of a head in TND from CANN 9.0 on, in blocks of at most 128 tokens.

Both documents at tag v9.0.0: "Q_D, K_D and V_D equal and at most 256", "blockSize <= 128"; ``CheckSpecConditions``.
Production: cann-recipes-infer, ``gpt_oss`` (64, with sinks) and ``gemma_4`` (256).
"""
_BATCHED = ("BSH", "BSND", "BNSD")
"""Layouts of heads of 512 dims without rope, from CANN 9.0 on: "D at most 512"; ``CheckFeatureLayout``; gemma_4."""
_LATENT_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD")
_ROPE_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "TND", "NTD", "NTD_TND")


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of one call that its limits depend on.

    Attributes:
        layout: its ``input_layout``.
        heads, kv_heads: of queries; of keys and values.
        dims: of a head of query, key and value.
        rope_dim: of ``query_rope``; 0 without one.
        sparse_mode: of the call.
        wants_lse: whether it asks for the log-sum-exp.
        block_size: of a paged cache; 0 without one.
        queries: S of a layout with a batch axis; None in packed ones.
        sequences: how many there are.
        keys: that the cache of one sequence has room for; None in packed layouts.
        int8: keys and values are int8.
        cann: release of CANN.
    """

    layout: str
    heads: int
    kv_heads: int
    dims: tuple[int | None, int | None, int | None]
    rope_dim: int
    sparse_mode: int
    wants_lse: bool
    block_size: int
    queries: int | None
    sequences: int | None
    keys: int | None
    int8: bool = False
    cann: tuple[int, int] = WIDE_HEADS

    @property
    def packed(self) -> bool:
        """True where queries of all sequences lie one after the other."""
        return "T" in self.layout

    @property
    def is_wide_packed(self) -> bool:
        """True for heads that no packed layout takes before CANN 9.0."""
        known = self.dims in ((HEAD_DIM,) * 3, (192, 192, HEAD_DIM))
        known = known or (self.dims == (64,) * 3 and self.heads == self.kv_heads)
        return self.packed and not self.rope_dim and not known


def head_dims(sizes: AttentionSizes) -> str:
    """Sizes of heads that the layout takes."""
    dims = dim, key_dim, value_dim = sizes.dims
    if dim is None or key_dim is None or value_dim is None:
        return "the size of a head varies"
    if any(d > LATENT_DIM or d % 16 for d in (dim, key_dim, value_dim)):
        return f"heads of {dims} dims; multiples of 16, at most {LATENT_DIM}"
    if dim != key_dim:
        return f"heads of {dim} dims in query, {key_dim} in key"
    if sizes.int8 and (dim % 32 or value_dim % 32):
        return f"heads of {dims} dims; multiples of 32 in int8"
    if sizes.rope_dim:
        if sizes.rope_dim != ROPE_DIM:
            return f"query_rope has {sizes.rope_dim} dims; it must have {ROPE_DIM}"
        if dim not in (HEAD_DIM, LATENT_DIM):
            return f"heads of {dims} dims with rope; {HEAD_DIM} or {LATENT_DIM}"
    if LATENT_DIM in dims and (
        sizes.rope_dim or sizes.int8 or sizes.cann < WIDE_HEADS or sizes.layout not in _BATCHED
    ):
        return _latent(sizes)
    if sizes.rope_dim:
        if sizes.layout not in _ROPE_LAYOUTS:
            return f"query_rope beside heads of {dim} dims is not for {sizes.layout}"
        if sizes.packed and dims != (HEAD_DIM,) * 3:
            return f"heads of {dims} dims with rope; {HEAD_DIM} in this layout"
    elif sizes.is_wide_packed:
        known = f"{HEAD_DIM}, 192 with values of {HEAD_DIM} and, without GQA, 64"
        if sizes.layout != "TND" or sizes.cann < WIDE_HEADS:
            return f"heads of {dims} dims; {sizes.layout} takes {known}, and TND more from CANN 9.0 on"
        if value_dim != dim or dim > PACKED_DIM:
            return f"heads of {dims} dims; TND takes {known}, and any up to {PACKED_DIM} that all three have"
    if sizes.packed:
        return ""
    if sizes.block_size and value_dim != dim:
        return f"values of {value_dim} dims beside keys of {dim}, with paging"
    return ""


def _latent(sizes: AttentionSizes) -> str:
    if not sizes.rope_dim:
        return (
            f"heads of {LATENT_DIM} dims need query_rope and key_rope; without these they are for "
            f"{', '.join(_BATCHED)} from CANN 9.0 on"
        )
    if sizes.layout not in _LATENT_LAYOUTS:
        return f"heads of {LATENT_DIM} dims are not for {sizes.layout}"
    if sizes.wants_lse:
        return f"heads of {LATENT_DIM} dims come without the log-sum-exp"
    if sizes.kv_heads != 1 or sizes.heads not in LATENT_HEADS or sizes.sparse_mode not in (0, 3, 4):
        return (
            f"{sizes.heads} heads over {sizes.kv_heads} with sparse_mode {sizes.sparse_mode}: heads of {LATENT_DIM} "
            "dims are for one KV head, a power of two of at most 128 heads, and sparse_mode 0, 3 or 4"
        )
    return ""


def blocks(sizes: AttentionSizes) -> str:
    """Sizes of blocks of a paged cache."""
    size = sizes.block_size
    if not size:
        return ""
    if sizes.int8:
        return "" if 32 <= size <= 512 and size % 32 == 0 else f"blocks of {size} in int8; multiples of 32 up to 512"
    if sizes.is_wide_packed and sizes.dims != (64,) * 3:
        return "" if 16 <= size <= 128 and size % 16 == 0 else f"blocks of {size}; multiples of 16 up to 128"
    if sizes.packed or (LATENT_DIM in sizes.dims and sizes.rope_dim):
        return "" if 16 <= size <= 1024 and size % 16 == 0 else f"blocks of {size}; multiples of 16 up to 1024"
    if sizes.queries == 1:
        return "" if 16 <= size <= 512 and size % 16 == 0 else f"blocks of {size}; multiples of 16 up to 512"
    return "" if size in (128, 256, 384, 512) else f"blocks of {size}; 128, 256, 384 or 512 for several tokens"


def extents(sizes: AttentionSizes) -> str:
    """Numbers of sequences, queries and keys."""
    most = MAX_PACKED_SEQUENCES if sizes.packed else MAX_SEQUENCES
    if sizes.sequences is not None and sizes.sequences > most:
        return f"{sizes.sequences} sequences; at most {most} in {sizes.layout}"
    if sizes.queries == 1 and sizes.keys is not None and sizes.keys > MAX_DECODE_CONTEXT:
        return f"{sizes.keys} keys before one query; at most {MAX_DECODE_CONTEXT} in {sizes.layout}"
    # The document keeps BNSD_BSND from single queries, too, but op-plugin's own test runs one through it.
    if sizes.layout == "BNSD_NBSD" and sizes.queries is not None and not 1 < sizes.queries <= 16:
        return f"{sizes.queries} queries a sequence in {sizes.layout}; 2 to 16"
    return ""
