"""Heads and windows of models that people run, in small layers: what attention becomes for two releases of CANN,
and tokens past the windows beside transformers'."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu import attention
from torch_pagoda.runtime.ops.npu.attention_core import AttentionCall, attend

from shared_graphs import capture

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, **BOTH},
    "gemma4_text": {
        **{"num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512, **BOTH},
        **{"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    },
    "phi3": {"hidden_size": 384, "num_key_value_heads": 4, "sliding_window": 512, "pad_token_id": 0},
    "qwen2": {"hidden_size": 256, "num_key_value_heads": 2},
    "gpt_oss": {"num_key_value_heads": 1, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4},
}
"""Head sizes and windows are those of Gemma 3 1B, Gemma 4, Phi-3 mini (96 dims), Qwen2.5 0.5B and gpt-oss."""


def model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SMALL, **MODELS[name]}, max_position_embeddings=1024)
    built: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return built


def target(cann: str) -> NpuTarget:
    return NpuTarget(cann=cann, float32_as=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "cann", "layouts"),
    [
        ("gemma3_text", "9.1", {("TND", 4): 1, ("TND", 3): 1}),
        ("gemma3_text", "8.5", {("BSH", 4): 1, ("BSH", 3): 1}),
        ("gemma4_text", "9.1", {("TND", 4): 1, ("BSH", 3): 1}),
        ("gemma4_text", "8.5", {("BSH", 4): 1}),  # heads of 512 dims by the formula
        ("phi3", "9.1", {("TND", 4): 2}),
        ("qwen2", "9.1", {("TND", 3): 2}),
        ("gpt_oss", "9.1", {("TND", 4): 1, ("TND", 3): 1}),
    ],
    ids=str,
)
def test_attention_is_lowered(name: str, cann: str, layouts: dict[tuple[str, int], int]) -> None:
    captured = capture(model(name))
    captured.traced.npu = target(cann)
    options = CompileOptions(codegen="none", target="npu", verify="off")
    traced = run_pipeline(captured, options, None, CompileReport(name))
    calls = [node for node in traced.graph.nodes if "infer_attention" in str(node.target)]
    assert Counter((node.kwargs["input_layout"], node.kwargs["sparse_mode"]) for node in calls) == layouts
    assert not any(node.target is torch.ops.aten.constant_pad_nd.default for node in traced.graph.nodes)


@pytest.mark.parametrize(("name", "cann"), [("gpt_oss", "9.1"), ("gemma4_text", "9.1"), ("gemma3_text", "8.5")])
def test_tokens_past_the_window_are_those_of_transformers(
    name: str, cann: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = model(name)
    built.save_pretrained(tmp_path)
    monkeypatch.setattr(CompileOptions, "npu_target", lambda *_: target(cann))
    single: list[AttentionCall] = []

    def noted(call: AttentionCall) -> Any:
        if call.input_layout == "BSH" and call.query.shape[1] == 1:
            single.append(call)
        return attend(call)

    monkeypatch.setattr(attention, "attend", noted)
    llm = LLM(str(tmp_path), target="npu", dtype="float32", max_num_seqs=2, max_model_len=640, num_blocks=16)
    prompts = [torch.randint(3, 128, (length,)).tolist() for length in (built.config.sliding_window + 70, 37)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=7, temperature=0, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = built.generate(ids, max_new_tokens=7, min_new_tokens=7, do_sample=False)
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    assert not single
