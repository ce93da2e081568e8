"""``torch.compile(model, backend="pagoda", options={"target": "npu"})``, run on the CPU by the reference kernels."""

from __future__ import annotations

import pytest
import torch
from npu_calls import illegal_calls
from transformers import StaticCache

from torch_pagoda.compiler import backend as module

from legal_models import build_legal_model

OPTIONS = {"target": "npu", "codegen": "none"}


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that the backend runs."""
    seen = []

    def kept(traced):
        seen.append(traced)
        return traced.module.forward

    monkeypatch.setattr(module, "call_kernels", kept)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "layers"), [("llama", 1), ("qwen3_moe", 1)])
def test_prefill_and_decode_in_a_cache_of_the_callers(name, layers, graphs):
    model = build_legal_model(name, dtype=torch.bfloat16, num_hidden_layers=layers)
    compiled = torch.compile(model, backend="pagoda", options=OPTIONS, dynamic=True)
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        caches = [StaticCache(model.config, max_cache_len=16) for _ in range(2)]
        for start, end in ((0, 7), (7, 8), (8, 9)):
            expected, found = (
                run(ids[:, start:end], past_key_values=cache, position_ids=torch.arange(start, end)[None]).logits
                for run, cache in zip((model, compiled), caches, strict=True)
            )
            error = (found - expected).float().abs().amax(-1) / expected.float().std()
            assert error.median() < 0.1
    assert graphs
    for traced in graphs:
        assert illegal_calls(traced, traced.npu) == []
        names = {str(n.target) for n in traced.graph.nodes}
        assert not [n for n in names if n.startswith("pagoda.")]
        wanted = {"fused_infer_attention_score", "add_rms_norm", "rotary_mul", "swiglu", "linear"}
        assert {f"npu.npu_{n}.default" for n in wanted} <= names


def test_added_inputs_do_not_hide_a_weight_that_moved(graphs):
    model = build_legal_model("llama", dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="pagoda", options=OPTIONS)
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        before = compiled(ids).logits
        model.model.layers[0].self_attn.q_proj.weight.data.mul_(2.0)  # in place: seen
        after = compiled(ids).logits
    assert not torch.equal(before, after)


def test_an_npu_codegen_needs_an_npu():
    model = build_legal_model("llama", dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="pagoda", options={"target": "npu", "codegen": "aclgraph"})
    with torch.inference_mode(), pytest.raises(Exception, match="codegen='aclgraph' needs an NPU"):
        compiled(torch.arange(3, 9)[None])
