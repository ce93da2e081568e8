"""Scaling curves: rates, bytes and operations, the tables and the plot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from peer_figures import prefill_flops, prompt_flops
from scaling import attention_layer, cold_start, decode_rate, kv_bytes, phases_of, plot, tables


def output(first: float, finished: float, tokens: int) -> SimpleNamespace:
    metrics = SimpleNamespace(first_token_time=first, finished_time=finished)
    return SimpleNamespace(metrics=metrics, outputs=[SimpleNamespace(token_ids=[0] * tokens)])


def test_decoding_counts_from_the_last_first_token():
    assert decode_rate([output(1.0, 3.0, 5), output(2.0, 4.0, 5)]) == 8 / 2


def test_bytes_and_products_of_attention():
    layer = attention_layer("qwen3-0.6b", 1000)
    assert (layer.heads, layer.kv_heads, layer.dim, layer.is_decode) == (16, 8, 128, True)
    # Keys and values, two bytes each.
    assert kv_bytes(layer) == 1000 * 8 * 128 * 2 * 2
    # Four operations for each of 16 heads' 128 numbers of each pair, in 28 layers.
    assert prompt_flops("qwen3-0.6b", 2) - prefill_flops("qwen3-0.6b", 2) == 28 * 4 * 16 * 128 * 3


def curves() -> dict:
    return {
        "threads": 2,
        "codegen": "inductor",
        "weights": "bf16",
        "batch_shape": "tinyllama-1.1b",
        "context_shape": "qwen3-0.6b",
        "limits": {"read_gb_per_s": 40.0, "gemm_gflops": 900.0},
        "batch": [{"batch": 4, "tokens_per_second": 60.0, "allowed": 80.0}],
        "context": [
            {
                "context": 128,
                "prefill_tokens_per_second": 500.0,
                "prefill_gflops": 450.0,
                "decode_tokens_per_second": 30.0,
                "attention_gb_per_s": 38.0,
            }
        ],
        "depth": [
            {"layers": 2, "seconds": {"capture": 1.0, "codegen": 4.0, "rest": 0.5}},
            {"layers": 4, "seconds": {"capture": 1.0, "passes": 1.5, "rest": 0.5}},
        ],
    }


def test_tables_say_what_part_of_the_limits_is_reached():
    text = tables(curves())
    assert "| 4 | 60 | 80 | 75% |" in text
    assert "| 128 | 500 | 50% | 30 | 38 | 95% |" in text
    assert "| layers | capture | codegen | passes | rest | first token |" in text
    assert "| 2 | 1 | 4 | 0 | 0.5 | 5.5 |" in text
    assert phases_of([{"seconds": {"rest": 1.0, "capture": 1.0}}]) == ["capture", "rest"]


def test_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot(curves(), tmp_path)
    assert (tmp_path / "scaling.png").stat().st_size > 1000


def test_a_cold_start_is_the_sum_of_its_phases():
    seconds = cold_start(1, {"codegen": "none", "quantization": None})
    assert {"capture", "passes", "rest"} <= set(seconds)
    assert all(value >= 0 for value in seconds.values())
