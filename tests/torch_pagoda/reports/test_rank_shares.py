"""Shares of several ranks: weights, KV heads and collectives, counted from a skeleton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torch_pagoda.compiler.costs.rank_shares import RankShares
from torch_pagoda.compiler.costs.skeleton import build_skeleton
from torch_pagoda.passes.rewrite import shard_vocabulary
from torch_pagoda.reports import Explanation, explain

from legal_models import build_legal_model

RANKS, LAYERS, HIDDEN, INNER, VOCAB, HEAD = 4, 6, 64, 96, 256, 16
BEGINNING = 8
"""Bytes of the number of the first row that a rank holds."""
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
}


@pytest.fixture(scope="module")
def found() -> Explanation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_vocabulary, "LEAST_PARAMETERS", VOCAB * HIDDEN)
        skeleton = build_skeleton(LlamaForCausalLM, LlamaConfig(**SIZES), torch.bfloat16)
        return explain(skeleton, tensor_parallel_size=RANKS)


@pytest.fixture(scope="module")
def shares(found: Explanation) -> RankShares:
    assert found.shares is not None
    return found.shares


def test_weights_are_those_of_all_layers(shares: RankShares) -> None:
    query, key, mlp = HIDDEN * HIDDEN, HIDDEN * 2 * HEAD, HIDDEN * INNER
    cut = VOCAB * HIDDEN * 2 + LAYERS * (2 * query + 3 * mlp)
    norms = (2 * LAYERS + 1) * HIDDEN
    tables = shares.weight_bytes - 2 * (cut + LAYERS * 2 * key + norms)
    assert 0 <= tables < 4 * HEAD  # rotary frequencies
    # Two ranks hold each KV head.
    assert shares.rank_weight_bytes == 2 * (cut // RANKS + LAYERS * 2 * key // 2 + norms) + tables + BEGINNING


def test_kv_heads_are_repeated_and_counted(shares: RankShares) -> None:
    assert shares.kv_heads == {2: 1}
    assert shares.whole_token_bytes == 2 * 2 * 2 * HEAD * LAYERS
    assert shares.token_bytes == shares.whole_token_bytes // 2


def test_collectives_of_a_step(shares: RankShares) -> None:
    reduced, gathered = shares.exchanges if shares.exchanges[0].operator == "all_reduce" else shares.exchanges[::-1]
    assert (reduced.count, gathered.count) == (2 * LAYERS + 1, 1)
    assert reduced.decode_bytes == reduced.prompt_bytes == (2 * LAYERS + 1) * HIDDEN * 2
    assert (gathered.decode_bytes, gathered.prompt_bytes) == (VOCAB * 2, 0)


def test_norms_are_whole_and_named(shares: RankShares) -> None:
    by_module = {weight.module: weight for weight in shares.whole}
    assert by_module["model.layers.*.input_layernorm"].count == LAYERS
    assert not [name for name in by_module if name.endswith("_proj")]


def test_the_report_says_so(found: Explanation) -> None:
    text = repr(found)
    assert "on each of 4 ranks" in text
    for words in ("Each of 4 ranks holds", "2 ranks hold each", "all_reduce", "Weights that every rank holds whole"):
        assert words in text
    assert found.to_dict()["ranks"]["kv_heads"] == {2: 1}


@pytest.mark.parametrize(("quantization", "size"), [(None, 2), ("int8", 1)])
def test_a_rank_reads_as_few_experts_as_the_best_spread_asks_for(quantization: str | None, size: int) -> None:
    """Of 8 experts on 4 ranks: one each where a token has 4, both where it has 8."""

    def decode(chosen: int) -> tuple[int, int]:
        model = build_legal_model("qwen3_moe", dtype=torch.bfloat16, num_experts=8, num_experts_per_tok=chosen)
        options: dict[str, Any] = {"target": "npu", "torchair": False, "verify": "off", "quantization": quantization}
        found = explain(model, tensor_parallel_size=RANKS, expert_parallel_size=RANKS, **options)
        assert found.npu is not None
        return found.npu.estimates[0].moved.weights, found.npu.estimates[0].flops

    config = build_legal_model("qwen3_moe").config
    elements = config.num_hidden_layers * 3 * config.hidden_size * config.moe_intermediate_size
    (read, flops), (read_of_both, flops_of_both) = decode(4), decode(8)
    assert read_of_both - read == elements * size
    assert flops_of_both - flops == 2 * elements
