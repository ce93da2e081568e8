"""Stages of a model of many layers, counted from a skeleton of few."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torch_pagoda.compiler.costs.skeleton import build_skeleton
from torch_pagoda.reports import explain

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 512, 10
LAYER = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN)
TABLE = 2 * VOCAB * HIDDEN


def test_layers_are_dealt_by_bytes() -> None:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB,
    )
    found = explain(build_skeleton(LlamaForCausalLM, config, torch.bfloat16), pipeline_parallel_size=3)
    shares = found.stages
    assert shares is not None
    assert [(share.first, share.last) for share in shares.stages] == [(0, 2), (3, 6), (7, 9)]
    assert [share.token_bytes for share in shares.stages] == [2 * 2 * HIDDEN * count for count in (3, 4, 3)]
    weights = [3 * LAYER + TABLE, 4 * LAYER, 3 * LAYER + TABLE]
    assert all(0 <= share.weight_bytes - size < 600 for share, size in zip(shares.stages, weights, strict=True))
    assert (shares.values, shares.crossing_bytes) == (2, 2 * 2 * HIDDEN)
    text = repr(found)
    assert "Each rank of a stage holds" in text
    assert "A stage passes on 2 tensors, 256 B per token." in text
    assert found.to_dict()["stages"]["stages"][1]["layers"] == [3, 6]


def test_more_stages_than_layers() -> None:
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCAB
    )
    found = explain(build_skeleton(LlamaForCausalLM, config, torch.bfloat16), pipeline_parallel_size=4)
    assert found.refused.startswith("pipeline_parallel_size=4: its layers can be parted into 3 stages at most")
