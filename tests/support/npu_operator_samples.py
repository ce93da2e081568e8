"""Sample calls of every `npu::` operator that has a CPU kernel: legal, small, with the variants that change results.

Used twice: with our definitions and fakes, and with torch_npu's own where the real package is at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

CAUSAL = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sample:
    """One call of ``npu::<operator>``; ``label`` tells what is special about it."""

    operator: str
    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.operator}-{self.label}"


def all_samples() -> list[Sample]:
    """Fresh tensors on every call, the same values each time."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    samples = [
        *_fused_attention(),
        *_flash_attention(),
        *_cache_writes(),
        *_norms(),
        *_activations(),
        *_rope(),
        *_mixture_of_experts(),
        *_chains(),
        *_quantization(),
        *_gated_delta_rules(),
        *_chosen_keys(),
    ]
    torch.set_rng_state(state)
    return samples


def _fused_attention() -> list[Sample]:
    heads, kv_heads, dim, value_dim, block = 4, 2, 128, 128, 16
    samples = []
    names = [
        ("npu_fused_infer_attention_score", "num_heads", "actual_seq_lengths", "actual_seq_lengths_kv", "scale"),
        (
            "npu_fused_infer_attention_score_v2",
            "num_query_heads",
            "actual_seq_qlen",
            "actual_seq_kvlen",
            "softmax_scale",
        ),
    ]
    shapes = {
        "BSH": (2, 3, heads * dim),
        "BSND": (2, 3, heads, dim),
        "BNSD": (2, heads, 3, dim),
        "TND": (6, heads, dim),
        "NTD": (heads, 6, dim),
    }
    kv_shapes = {
        "BSH": (2, 5, kv_heads * dim),
        "BSND": (2, 5, kv_heads, dim),
        "BNSD": (2, kv_heads, 5, dim),
        "TND": (10, kv_heads, dim),
        "NTD": (kv_heads, 10, dim),
    }
    layouts = (
        "BSH BSND BNSD TND NTD BNSD_BSND BSH_BNSD BSND_BNSD BSH_NBSD BSND_NBSD BNSD_NBSD TND_NTD NTD_TND".split()
    )
    for name, num_heads, q_lengths, kv_lengths, scale in names:
        lse = "softmax_lse_flag" if scale == "scale" else "return_softmax_lse"
        common = {num_heads: heads, "num_key_value_heads": kv_heads, scale: 0.25}
        for index, layout in enumerate(layouts):
            inputs = layout.partition("_")[0]
            dtype = DTYPES[index % 3]
            query = torch.randn(shapes[inputs]).to(dtype)
            key, value = (torch.randn(kv_shapes[inputs]).to(dtype) for _ in range(2))
            options = {**common, "input_layout": layout}
            if "T" in inputs:
                options |= {q_lengths: [2, 6], kv_lengths: [3, 10], "atten_mask": CAUSAL, "sparse_mode": 3}
            samples.append(Sample(name, layout, (query, key, value), options))
            samples.append(Sample(name, f"{layout}-lse", (query, key, value), {**options, lse: True}))
        table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
        caches = {
            "BnBsH": torch.randn(4, block, kv_heads * dim),
            "BnNBsD": torch.randn(4, kv_heads, block, value_dim),
        }
        for form, cache in caches.items():
            query = torch.randn(6, heads, dim)
            options = {
                **common,
                q_lengths: [2, 6],
                kv_lengths: [9, 16],
                "block_table": table,
                "block_size": block,
                "input_layout": "TND",
                "atten_mask": CAUSAL,
                "sparse_mode": 4,
                "pre_tokens": 3,
                "next_tokens": 0,
            }
            samples.append(Sample(name, f"paged-{form}", (query, cache, cache), options))
        latent = torch.randn(4, 1, 32, block, 16).bfloat16()
        options = {
            num_heads: 4,
            "num_key_value_heads": 1,
            q_lengths: [2, 6],
            kv_lengths: [9, 16],
            "block_table": table,
            "block_size": block,
            "input_layout": "TND_NTD",
            "query_rope": torch.randn(6, 4, 64).bfloat16(),
            "key_rope": torch.randn(4, 1, 4, block, 16).bfloat16(),
            "atten_mask": CAUSAL,
            "sparse_mode": 3,
        }
        samples.append(Sample(name, "mla", (torch.randn(6, 4, 512).bfloat16(), latent, latent), options))
    int8 = torch.randint(-128, 128, (2, kv_heads, 6, dim), dtype=torch.int8)
    options = {
        "num_query_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": "BNSD",
        "dequant_scale_key": torch.rand(1, kv_heads, 1, dim).bfloat16(),
        "dequant_scale_value": torch.rand(1, kv_heads, 1, dim).bfloat16(),
    }
    query = torch.randn(2, heads, 1, dim).bfloat16()
    samples.append(Sample("npu_fused_infer_attention_score_v2", "int8", (query, int8, int8), options))
    cache = torch.randint(-128, 128, (4, 2 * block, kv_heads * dim), dtype=torch.int8)
    options = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": "BSH",
        "actual_seq_lengths_kv": [40, 9],
        "block_table": torch.tensor([[3, 1], [0, 2]], dtype=torch.int32),
        "block_size": 2 * block,
        "key_antiquant_scale": torch.rand(4, kv_heads, 2 * block),
        "value_antiquant_scale": torch.rand(4, kv_heads, 2 * block),
        "key_antiquant_mode": 5,
        "value_antiquant_mode": 5,
    }
    query = torch.randn(2, 1, heads * dim).bfloat16()
    samples.append(Sample("npu_fused_infer_attention_score", "int8 in blocks", (query, cache, cache), options))
    options = {
        "num_query_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": "TND",
        "actual_seq_qlen": [2, 6],
        "actual_seq_kvlen": [3, 10],
        "learnable_sink": torch.randn(heads).bfloat16(),
    }
    tensors = [torch.randn(n, h, dim).bfloat16() for n, h in ((6, heads), (10, kv_heads), (10, kv_heads))]
    samples.append(Sample("npu_fused_infer_attention_score_v2", "sinks", tuple(tensors), options))
    return samples


def _flash_attention() -> list[Sample]:
    samples = []
    for layout, shape, kv_shape in (
        ("BSH", (2, 3, 64), (2, 3, 32)),
        ("BSND", (2, 3, 4, 16), (2, 3, 2, 16)),
        ("BNSD", (2, 4, 3, 16), (2, 2, 3, 16)),
        ("BNSD_BSND", (2, 4, 3, 16), (2, 2, 3, 16)),
    ):
        arguments = (torch.randn(shape).bfloat16(), *(torch.randn(kv_shape).bfloat16() for _ in range(2)))
        options = {"num_heads": 4, "num_key_value_heads": 2, "scale_value": 0.25, "input_layout": layout}
        samples.append(Sample("npu_prompt_flash_attention", layout, arguments, options))
    options = {"num_heads": 4, "num_key_value_heads": 2, "scale_value": 0.25, "input_layout": "BNSD"}
    transposed = torch.randn(2, 3, 4, 16).transpose(1, 2), *(torch.randn(2, 2, 3, 16) for _ in range(2))
    samples.append(Sample("npu_prompt_flash_attention", "strided", transposed, options))
    tokens = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 8)
    packed = {**options, "input_layout": "TND", "actual_seq_lengths": [2, 6], "actual_seq_lengths_kv": [2, 6]}
    samples.append(Sample("npu_prompt_flash_attention", "TND", tokens, packed))
    decode = torch.randn(2, 4, 1, 16), *(torch.randn(2, 2, 5, 16) for _ in range(2))
    samples.append(Sample("npu_incre_flash_attention", "BNSD", decode, {**options, "actual_seq_lengths": [2, 5]}))
    return samples


def _cache_writes() -> list[Sample]:
    key, value = torch.randn(3, 2, 32), torch.randn(3, 2, 16)
    slots = torch.tensor([9, -1, 4])
    plain = torch.zeros(3, 8, 2, 32), torch.zeros(3, 8, 2, 16)
    columns = torch.zeros(3, 4, 8, 16), torch.zeros(3, 2, 8, 16)
    samples = [
        Sample("npu_scatter_pa_kv_cache", "Norm", (key, value, *plain, slots), {"cache_mode": "Norm"}),
        Sample("npu_scatter_pa_kv_cache", "PA_NZ", (key, value, *columns, slots.int()), {"cache_mode": "PA_NZ"}),
        Sample("npu_scatter_nd_update_", "rows", (torch.randn(4, 5), torch.tensor([[2], [0]]), torch.randn(2, 5))),
        Sample("npu_scatter_nd_update_", "points", (torch.randn(4, 5), torch.tensor([[2, 1]]), torch.randn(1))),
        Sample("scatter_update_", "offsets", (torch.randn(2, 6, 5), torch.tensor([1, 3]), torch.randn(2, 2, 5), -2)),
        Sample("scatter_update_", "pairs", (torch.randn(3, 6), torch.tensor([[2, 1]]), torch.randn(1, 2), 1)),
    ]
    return samples


def _norms() -> list[Sample]:
    samples = []
    for dtype in DTYPES:
        x, y = torch.randn(2, 3, 8).to(dtype), torch.randn(2, 3, 8).to(dtype)
        gamma, beta = torch.randn(8).to(dtype), torch.randn(8).to(dtype)
        label = str(dtype).removeprefix("torch.")
        samples += [
            Sample("npu_rms_norm", label, (x, gamma, 1e-5)),
            Sample("npu_gemma_rms_norm", label, (x, gamma, 1e-5)),
            Sample("npu_add_rms_norm", label, (x, y, gamma, 1e-5)),
            Sample("npu_add_rms_norm_cast", label, (x, y, gamma, 1e-5)),
            Sample("npu_add_layer_norm", label, (x, y, gamma, beta, 1e-5, True)),
        ]
    strided = torch.randn(3, 2, 8).transpose(0, 1)
    samples += [
        Sample("npu_rms_norm", "strided", (strided, torch.randn(8))),
        Sample("npu_rms_norm", "two dims", (torch.randn(2, 3, 8), torch.randn(3, 8))),
        Sample("npu_add_rms_norm", "strided", (strided, torch.randn(2, 3, 8), torch.randn(8))),
        Sample("npu_add_rms_norm_cast", "strided", (strided, torch.randn(2, 3, 8), torch.randn(8))),
    ]
    return samples


def _activations() -> list[Sample]:
    samples = []
    for index, name in enumerate(("npu_swiglu", "npu_gelu", "npu_gelu_mul", "npu_silu", "npu_fast_gelu")):
        samples.append(Sample(name, "plain", (torch.randn(2, 3, 8).to(DTYPES[index % 3]),)))
        samples.append(Sample(name, "strided", (torch.randn(3, 2, 8).transpose(0, 1),)))
    x = torch.randn(2, 6, 8).bfloat16()
    samples += [
        Sample("npu_linear", "plain", (torch.randn(5, 8), torch.randn(6, 8))),
        Sample("npu_linear", "bias", (torch.randn(5, 8), torch.randn(6, 8), torch.randn(6))),
        Sample("npu_transpose_batchmatmul", "batch first", (torch.randn(3, 5, 16), torch.randn(3, 16, 32))),
        Sample(
            "npu_transpose_batchmatmul",
            "rows first",
            (torch.randn(5, 3, 16).half(), torch.randn(3, 16, 32).half()),
            {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2], "batch_split_factor": 2},
        ),
        Sample("npu_gelu", "tanh", (x,), {"approximate": "tanh"}),
        Sample("npu_swiglu", "dim", (x, 1)),
        Sample("npu_geglu", "tanh", (x,)),
        Sample("npu_geglu", "left", (x, 1, 0, True)),
        Sample("npu_clipped_swiglu", "interleaved", (x,)),
        Sample("npu_clipped_swiglu", "halves", (x,), {"dim": 1, "interleaved": False}),
        Sample("npu_clipped_swiglu", "groups", (x[0],), {"group_index": torch.tensor([2, 1])}),
    ]
    return samples


def _rope() -> list[Sample]:
    samples = []
    for dtype in DTYPES:
        label = str(dtype).removeprefix("torch.")
        tokens, table = torch.randn(5, 3, 64).to(dtype), torch.randn(2, 5, 1, 64).to(dtype)
        samples.append(Sample("npu_rotary_mul", label, (tokens, table[0], table[1])))
        batch = torch.randn(2, 3, 5, 64).to(dtype)
        table = torch.randn(2, 2, 1, 5, 64).to(dtype)
        samples.append(Sample("npu_interleave_rope", label, (batch, table[0], table[1])))
    table = torch.randn(2, 2, 1, 5, 64)
    strided = torch.randn(2, 5, 3, 64).transpose(1, 2)
    samples += [
        Sample("npu_rotary_mul", "interleave", (strided, table[0], table[1], "interleave")),
        Sample("npu_rotary_mul", "matrix", (strided, table[0], table[1], "half", torch.randn(64, 64))),
        Sample("npu_interleave_rope", "strided", (strided, table[0], table[1])),
    ]
    query, key, tables = torch.randn(2, 5, 3, 64), torch.randn(2, 5, 1, 64), torch.randn(2, 2, 5, 1, 64)
    samples.append(Sample("npu_apply_rotary_pos_emb", "two numbers of heads", (query, key, *tables)))
    return samples


def _mixture_of_experts() -> list[Sample]:
    x, experts = torch.randn(5, 8), torch.stack([torch.randperm(6)[:2] for _ in range(5)]).int()
    routing = {"expert_num": 6, "active_expert_range": [0, 6], "row_idx_type": 0}
    rows = torch.randn(10, 8)
    whole_rows = rows.mul(9).to(torch.int8)
    pairs = torch.randint(-(1 << 31), 1 << 31, (3, 8, 2)).to(torch.int32)  # 16 outputs of 4 bits
    weights, ends = torch.randn(3, 8, 4), torch.tensor([2, 2, 10])
    grouped = {"group_list": ends, "split_item": 2, "group_type": 0, "group_list_type": 0}
    places = torch.randperm(10).int()
    tokens = torch.randn(5, 8)
    finalize = (rows, tokens, tokens, torch.randn(6, 8), torch.rand(5, 2), places, experts)
    samples = [
        Sample("npu_moe_gating_top_k", "softmax", (torch.randn(5, 8), 2)),
        Sample(
            "npu_moe_gating_top_k",
            "groups",
            (torch.randn(5, 16).bfloat16(), 3),
            {
                "bias": torch.randn(16).bfloat16(),
                "k_group": 2,
                "group_count": 4,
                "group_select_mode": 1,
                "norm_type": 1,
                "out_flag": True,
            },
        ),
        Sample("npu_moe_gating_top_k_softmax", "2d", (torch.randn(5, 8).half(), None, 2)),
        Sample("npu_moe_gating_top_k_softmax", "3d", (torch.randn(2, 5, 8), None, 3)),
        Sample("npu_moe_gating_top_k_softmax_v2", "of all", (torch.randn(5, 8),), {"k": 3, "output_softmax": True}),
        Sample("npu_moe_gating_top_k_softmax_v2", "of the chosen", (torch.randn(5, 32),), {"k": 3, "renorm": 1}),
        Sample("npu_moe_init_routing_v2", "plain", (x, experts), routing),
        Sample("npu_moe_init_routing_v2", "unset range", (x, experts), {"expert_num": 6}),
        Sample("npu_moe_init_routing_v2", "scale", (x.bfloat16(), experts), {**routing, "scale": torch.rand(5)}),
        Sample("npu_grouped_matmul", "cumsum", ([rows], [weights]), grouped),
        Sample("npu_grouped_matmul", "transposed", ([rows], [torch.randn(3, 4, 8).transpose(1, 2)]), grouped),
        Sample(
            "npu_grouped_matmul",
            "counts",
            ([rows.bfloat16()], [weights.bfloat16()]),
            {
                **grouped,
                "group_list": torch.tensor([2, 0, 8]),
                "group_list_type": 1,
                "split_item": 3,
                "bias": [torch.randn(3, 4)],
            },
        ),
        Sample("npu_moe_init_routing_v2", "int8", (x.bfloat16(), experts), {**routing, "quant_mode": 1}),
        Sample(
            "npu_grouped_matmul",
            "int8",
            ([rows.mul(9).to(torch.int8)], [weights.mul(9).to(torch.int8)]),
            {
                **grouped,
                "scale": [torch.rand(3, 4).bfloat16()],
                "per_token_scale": [torch.rand(10)],
                "output_dtype": 15,
            },
        ),
        Sample(
            "npu_grouped_matmul_swiglu_quant_v2",
            "counts",
            (
                whole_rows,
                [weights.mul(9).to(torch.int8)],
                [torch.rand(3, 4)],
                torch.rand(10),
                torch.tensor([2, 0, 8]),
            ),
            {"group_list_type": 1},
        ),
        Sample(
            "npu_grouped_matmul_swiglu_quant_v2",
            "4 bits",
            (whole_rows, [pairs], [torch.zeros(3, 16, dtype=torch.int64)], torch.rand(10), torch.tensor([2, 2, 10])),
            {"weight_assist_matrix": [torch.rand(3, 16)]},
        ),
        Sample("npu_moe_finalize_routing", "columns", finalize, {"drop_pad_mode": 0}),
        Sample("npu_moe_finalize_routing", "rows", (rows, None, None, None, *finalize[4:6], None, 2)),
        Sample("npu_moe_finalize_routing", "k", (rows, None, None, None, None, places, None, 2, 2)),
        Sample("npu_moe_finalize_routing", "padded", (rows.view(2, 5, 8), None, None, None, *finalize[4:6], None, 3)),
        Sample("npu_moe_token_unpermute", "weights", (rows, places, finalize[4])),
        Sample("npu_moe_token_unpermute", "plain", (rows.bfloat16(), places)),
        Sample("npu_moe_compute_expert_tokens", "plain", (torch.tensor([0, 0, 2, 5], dtype=torch.int32), 6)),
    ]
    for kind in range(3):
        options = {
            **routing,
            "expert_tokens_num_flag": True,
            "expert_tokens_num_type": kind,
            "row_idx_type": kind % 2,
        }
        samples.append(Sample("npu_moe_init_routing_v2", f"counts {kind}", (x, experts), options))
    return samples


def _chains() -> list[Sample]:
    samples = []
    kv, gamma = torch.randn(2, 1, 3, 96).bfloat16(), torch.randn(32).bfloat16()
    tables = tuple(torch.randn(2, 2, 1, 3, 64).bfloat16())
    slots = torch.tensor([3, 9, -1, 12, 13, 0])
    paged = torch.zeros(3, 8, 1, 64).bfloat16(), torch.zeros(3, 8, 1, 32).bfloat16()
    for mode, output in (("PA", True), ("PA_BNSD", False), ("PA_NZ", True)):
        options = {"cache_mode": mode, "is_output_kv": output}
        samples.append(Sample("npu_kv_rmsnorm_rope_cache_v2", mode, (kv, gamma, *tables, slots, *paged), options))
    rows = torch.zeros(2, 1, 6, 64).bfloat16(), torch.zeros(2, 1, 6, 32).bfloat16()
    places = torch.tensor([[0, 1, 2], [3, 4, 5]])
    samples.append(Sample("npu_kv_rmsnorm_rope_cache_v2", "Norm", (kv, gamma, *tables, places, *rows)))
    int8 = tuple(cache.to(torch.int8) for cache in paged)
    options = {"cache_mode": "PA_NZ", "k_rope_scale": torch.rand(64) * 9, "c_kv_scale": torch.rand(32) * 9}
    samples.append(Sample("npu_kv_rmsnorm_rope_cache_v2", "int8", (kv, gamma, *tables, slots, *int8), options))
    wide = torch.zeros(3, 8, 1, 96).bfloat16(), torch.zeros(3, 8, 1, 16).bfloat16()
    options = {"cache_mode": "PA", "v": torch.randn(2, 1, 3, 16).bfloat16(), "is_output_kv": True}
    arguments = (kv, torch.randn(96).bfloat16(), *tables, slots, *wide)
    samples.append(Sample("npu_kv_rmsnorm_rope_cache_v2", "with v", arguments, options))

    qkv, norm = torch.randn(6, 8 * 32).half(), torch.randn(32).half()
    for output in (True, False):
        arguments = (
            *(qkv, norm, norm, torch.randn(6, 32).half(), torch.randn(6, 32).half(), slots),
            *(torch.zeros(6, 128).half(), torch.zeros(3, 4, 8, 16).half(), torch.zeros(3, 4, 8, 16).half()),
            *([2, 3, 8, 32], [4, 2, 2]),
        )
        samples.append(
            Sample("npu_qkv_rms_norm_rope_cache", f"output {output}", arguments, {"is_output_qkv": output})
        )

    heads, hidden, compressed, content, latent, rope = 2, 64, 48, 32, 32, 16
    weights = [(hidden, compressed), (compressed, heads * (content + rope)), (heads, content, latent)]
    weights += [(hidden, latent + rope), (compressed,), (latent,)]
    tensors = [torch.randn(shape).bfloat16() / 8 for shape in weights]
    for mode, shape, flag in (("PA_BSND", (6,), False), ("PA_NZ", (2, 3), True)):
        caches = torch.zeros(3, 8, 1, latent).bfloat16(), torch.zeros(3, 8, 1, rope).bfloat16()
        arguments = (
            torch.randn(*shape, hidden).bfloat16(),
            *tensors,
            *torch.randn(2, *shape, rope).bfloat16(),
            *caches,
        )
        options = {"cache_index": slots.reshape(shape), "cache_mode": mode, "query_norm_flag": flag}
        samples.append(Sample("npu_mla_prolog_v3", mode, arguments, options))
    return samples


def _quantization() -> list[Sample]:
    x = torch.randn(2, 3, 8)
    whole, matrix = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((5, 64), (64, 16)))
    scales, rows, bias = torch.rand(16), torch.rand(5), torch.rand(16)
    half = {"activate_left": True, "quant_mode": 1}
    sums = torch.randint(-999, 999, (5, 128), dtype=torch.int32)
    norm = x.bfloat16(), x.bfloat16(), torch.rand(8).bfloat16()
    return [
        Sample("npu_quant_matmul", "bf16", (whole, matrix, scales), {"pertoken_scale": rows, "output_dtype": 15}),
        Sample(
            "npu_quant_matmul",
            "bf16 scales, bias",
            (whole, matrix, scales.bfloat16()),
            {"pertoken_scale": rows, "output_dtype": 15, "bias": bias.bfloat16()},
        ),
        Sample(
            "npu_quant_matmul",
            "fp16, view",
            (whole, matrix.t().contiguous().t(), scales),
            {"pertoken_scale": rows, "output_dtype": 5, "bias": bias},
        ),
        Sample("npu_quant_matmul", "no rows", (whole, matrix, scales), {"output_dtype": 15}),
        Sample("npu_quant_matmul", "bits", (whole, matrix, torch.ones_like(scales).long()), {"output_dtype": 5}),
        Sample("npu_quant_matmul", "int32", (whole, matrix, scales), {"output_dtype": 3}),
        Sample("npu_quant_matmul", "int8", (whole, matrix, scales)),
        Sample(
            "npu_quant_matmul",
            "int4 in groups",
            (
                torch.randint(-128, 128, (5, 512), dtype=torch.int8),
                torch.zeros(512, 2, dtype=torch.int32),
                torch.ones(2, 16, dtype=torch.int64),
            ),
            {"offset": scales, "pertoken_scale": rows[:, None], "output_dtype": 15, "group_sizes": [0, 0, 256]},
        ),
        Sample("npu_weight_quant_batchmatmul", "int8", (torch.randn(5, 64).bfloat16(), matrix, scales.bfloat16())),
        Sample(
            "npu_weight_quant_batchmatmul",
            "int4",
            (
                torch.randn(5, 64).half(),
                torch.randint(-(2**31), 2**31 - 1, (64, 2), dtype=torch.int32),
                *(torch.rand(2, 2, 16).half()),
                *(None, None, bias.half(), 32),
            ),
        ),
        Sample("npu_dequant_swiglu_quant", "bf16", (torch.randn(5, 128).bfloat16(),), half),
        Sample(
            "npu_dequant_swiglu_quant",
            "sums",
            (sums,),
            {**half, "weight_scale": torch.rand(1, 128), "activation_scale": torch.rand(5, 1)},
        ),
        Sample(
            "npu_dequant_swiglu_quant",
            "groups",
            (torch.randn(5, 128).bfloat16(),),
            {**half, "group_index": torch.tensor([2, 0, 3])},
        ),
        Sample("npu_add_rms_norm_dynamic_quant", "bf16", norm, {"output_mask": [True, False]}),
        Sample("npu_add_rms_norm_dynamic_quant", "no mask", tuple(t.half() for t in norm), {"epsilon": 1e-5}),
        Sample("npu_add_rms_norm_quant", "bf16", (*norm, torch.rand(8).bfloat16(), torch.ones(8).bfloat16())),
        Sample("npu_add_rms_norm_quant", "bf16 by float32", (*norm, torch.rand(8), torch.ones(8).int())),
        Sample("npu_add_rms_norm_quant", "fp16", (*(t.half() for t in norm), torch.rand(8), torch.ones(8).int())),
        Sample("npu_add_rms_norm_quant", "no offset", (*norm, torch.rand(8).bfloat16(), None), {"epsilon": 1e-5}),
        Sample("npu_dynamic_quant", "plain", (x.bfloat16(),)),
        Sample("npu_dynamic_quant", "smooth", (x.half(),), {"smooth_scales": torch.rand(8).half()}),
        Sample("npu_dynamic_quant", "strided", (torch.randn(3, 2, 8).transpose(0, 1),)),
        Sample("npu_quantize", "int8", (x, torch.rand(8) / 9, torch.randint(0, 5, (8,)).int(), 1, -1, True)),
        Sample(
            "npu_quantize", "qint8", (x.bfloat16(), torch.rand(1), torch.ones(1, dtype=torch.int32), 12, -1, True)
        ),
        Sample("npu_quantize", "uint8", (x, torch.rand(1, 1, 8) * 90, None, 13, -1, False)),
        Sample("npu_quantize", "int32", (x, torch.rand(1), None, 3)),
        Sample("npu_format_cast", "nz", (x.half(), 29)),
        Sample("npu_format_cast", "strided", (x.transpose(0, 1), 2)),
        Sample("npu_prefetch", "alone", (x, None, 64)),
        Sample("npu_prefetch", "behind", (x, x + 1, 64, 32)),
    ]


def _gated_delta_rules() -> list[Sample]:
    tokens, key_heads, heads, dim, value_dim = 5, 2, 4, 16, 8
    query, key = (torch.randn(tokens, key_heads, dim).bfloat16() / 4 for _ in range(2))
    value, beta = torch.randn(tokens, heads, value_dim).bfloat16(), torch.rand(tokens, heads).bfloat16()
    state, g = torch.randn(6, heads, value_dim, dim).bfloat16(), -torch.rand(tokens, heads)
    chunked = {"beta": beta, "initial_state": state[:3], "actual_seq_lengths": torch.tensor([3, 1, 1]).int()}
    recurrent = {
        "beta": beta,
        "actual_seq_lengths": torch.tensor([3, 1, 1]).int(),
        "ssm_state_indices": torch.tensor([4, 0, 2, 3, 5]).int(),
    }
    accepted = torch.tensor([2, 1, 1]).int()
    by_channel = -torch.rand(tokens, heads, dim)
    return [
        Sample("npu_chunk_gated_delta_rule", "plain", (query, key, value), chunked),
        Sample("npu_chunk_gated_delta_rule", "decays", (query, key, value), {**chunked, "scale": 0.25, "g": g}),
        Sample("npu_recurrent_gated_delta_rule", "plain", (query, key, value, state), recurrent),
        Sample(
            "npu_recurrent_gated_delta_rule",
            "decays",
            (query, key, value, state),
            {**recurrent, "scale": 0.5, "g": g, "gk": by_channel, "num_accepted_tokens": accepted},
        ),
    ]


def _chosen_keys() -> list[Sample]:
    samples = []
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    ends, lens = torch.tensor([2, 6], dtype=torch.int32), torch.tensor([19, 7], dtype=torch.int32)
    for index, layouts in enumerate([("TND", "PA_BSND"), ("TND", "TND"), ("BSND", "BSND"), ("BSND", "PA_BSND")]):
        dtype, (queries, keys) = DTYPES[index % 3], layouts
        shape = (6,) if queries == "TND" else (2, 3)
        key_shape = {"PA_BSND": (4, 16), "TND": (26,), "BSND": (2, 19)}[keys]

        def made(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(sizes).to(dtype)

        given: dict[str, Any] = {"layout_query": queries, "block_table": table if keys == "PA_BSND" else None}
        given["actual_seq_lengths_query"] = ends if queries == "TND" else None
        key_lens = {"PA_BSND": lens, "TND": torch.tensor([19, 26], dtype=torch.int32), "BSND": None}[keys]
        options = {**given, "layout_key": keys, "actual_seq_lengths_key": key_lens, "sparse_count": 5}
        weights = made(*shape, 8, dtype=torch.float32 if index else dtype)
        inputs = made(*shape, 8, 128), made(*key_shape, 1, 128), weights
        samples.append(Sample("npu_lightning_indexer", "-".join(layouts), inputs, options))
        places = torch.arange(5, dtype=torch.int32).expand(*shape, 1, 5).contiguous()
        latent = made(*key_shape, 1, 512)
        options = {**given, "layout_kv": keys, "actual_seq_lengths_kv": key_lens, "attention_mode": 2}
        options |= {"query_rope": made(*shape, 4, 64), "key_rope": made(*key_shape, 1, 64)}
        inputs = made(*shape, 4, 512), latent, latent, places, 0.25
        samples.append(Sample("npu_sparse_flash_attention", "-".join(layouts), inputs, options))
    return samples
