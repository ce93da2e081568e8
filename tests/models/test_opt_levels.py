"""Optimization levels: 1 changes no bit, 2 reaches the promised number of operators, every pass can be left out."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.verify.self_check import compared_steps, reference_of_model
from torch_pagoda.passes import PASSES
from torch_pagoda.reports import explain

from tiny_models import build_tiny_model


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return build_tiny_model("qwen3")


def logits(model, **options):
    """Logits of all rows of the self-check's steps, without the self-check."""
    program = build_program(model, CompileOptions(codegen="none", verify="off", **options))
    return [found.clone() for _, found, _ in compared_steps(program, reference_of_model(model))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "phi3", "gpt2", "deepseek_v2"])
def test_level_1_is_bitwise_level_0(name, dtype):
    model = build_tiny_model(name, dtype=dtype)
    lowest, first = logits(model, opt_level=0), logits(model, opt_level=1)
    assert len(lowest) == len(first) > 4
    assert all(torch.equal(a, b) for a, b in zip(lowest, first, strict=True))


@pytest.mark.parametrize(
    ("name", "operators"), [("llama", 9), ("qwen2", 9), ("mistral", 9), ("qwen3", 11), ("phi3", 9), ("gpt2", 8)]
)
def test_operators_per_layer(name, operators):
    found = explain(build_tiny_model(name), verify="off")
    assert found.target_graph.launches_per_layer == operators
    assert not found.leftovers
    assert found.target_graph.cache_copies == 0


@pytest.mark.parametrize("name", dict.fromkeys(p.name for p in PASSES if not p.required and not p.option))
def test_any_optional_pass_can_be_left_out(name, qwen3):
    program = build_program(qwen3, CompileOptions(codegen="none", passes={"skip": [name]}))
    assert program.report.verdict.ok and not program.report.dropped_passes
    assert name not in [record.name for record in program.report.passes]
