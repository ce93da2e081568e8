"""Whole models lowered for an NPU and run by the reference kernels: numbers, legality and operators per layer.

Sizes are those that the limits allow, in float32 that counts as bfloat16, so that the numbers can be compared
closely. The served tokens and log-probabilities are transformers'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from npu_calls import illegal_calls

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work, operator_name
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from hf_reference import forced
from legal_models import build_legal_model
from shared_graphs import capture

# Architecture → kernel launches of its last decoder layer, and what is left in ATen there beside splits.
LAYERS: dict[str, tuple[int, set[str]]] = {
    "llama": (11, set()),
    "qwen2": (11, set()),
    "qwen3": (13, set()),
    "mistral": (11, set()),
    "gemma3_text": (17, {"aten.add"}),
    "phi3": (11, set()),
    "gpt2": (9, {"aten.addmm"}),
    "gpt_neox": (12, {"aten.add", "aten.native_layer_norm"}),
    "opt": (13, {"aten.native_layer_norm", "aten.mul", "aten.add", "aten.relu"}),
    "falcon": (11, {"aten.add"}),
    "mixtral": (17, {"aten.sum", "aten.div"}),
    "qwen3_moe": (17, set()),
    "gpt_oss": (17, {"aten.sum", "aten.div"}),
    "glm4": (14, set()),
    "olmo2": (14, {"aten.add"}),
    "cohere": (12, {"aten.add"}),
    "starcoder2": (11, set()),
    "granite": (13, {"aten.mul"}),
}
# What the kernel does not know runs over gathered blocks: soft caps and ALiBi.
GATHERED = {"gemma2": "it knows no soft cap", "bloom": "it knows no ALiBi"}
LATENT = ("deepseek_v3",)
MODELS = (*LAYERS, *GATHERED, *LATENT)
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=8)
TARGET = NpuTarget(block_size=16, float32_as=torch.bfloat16)


@cache
def compiled(model_type, target=TARGET, skip=()):
    """The model, its lowered graph and the report."""
    model = build_legal_model(model_type)
    captured = capture(model)
    captured.traced.npu = target
    report = CompileReport(model_type)
    options = CompileOptions(codegen="none", target="npu", verify="off", passes={"skip": list(skip)})
    return model, run_pipeline(captured, options, None, report), report


def last_layer(traced):
    """Operators of the last decoder layer that launch work, splits among them."""
    layers = decoder_layers(traced.graph)
    names = [
        operator_name(n)
        for n in layers.nodes(len(layers.paths) - 1)
        if launches_work(n) or operator_name(n) == "aten.split_with_sizes"
    ]
    # Only the last layer works on the asked rows alone, and takes them out of the others.
    return Counter(name for name in names if name != "aten.index_select")


@pytest.mark.parametrize("model_type", MODELS, scope="module")
def test_prefill_chunks_and_decode_are_exact(model_type):
    assert_exact(*compiled(model_type))


def test_rotations_that_are_spelled_out_for_captured_graphs_are_exact():
    """Those of keys and values that were not absorbed, with dims that lie apart."""
    target = replace(TARGET, graph_mode="aclgraph")
    assert_exact(*compiled("deepseek_v3", target, ("absorb_latent_attention",)))


def assert_exact(model, traced, report):
    assert not report.dropped_passes
    engine = Engine(link(traced, traced.module), block_size=16, num_blocks=24, max_num_batched_tokens=19)
    prompts = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 5, 23)]
    for output in engine.generate(prompts, GREEDY):
        (completion,) = output.outputs
        expected = forced(model, output.prompt_token_ids, completion.token_ids)
        assert completion.token_ids == expected.tokens
        assert expected.largest_error(completion.token_ids, completion.logprobs) < TOLERANCE


@pytest.mark.parametrize("model_type", MODELS, scope="module")
def test_every_call_is_legal_and_nothing_canonical_is_left(model_type):
    _, traced, _ = compiled(model_type)
    assert illegal_calls(traced, TARGET) == []
    assert not [n for n in traced.graph.nodes if str(n.target).startswith("pagoda.")]
    assert all(spec.by_token for spec in traced.caches)
    caches = [n for n in traced.placeholders if "_cache_" in n.name]
    assert all(value(n).is_contiguous() for n in caches)


@pytest.mark.parametrize("model_type", LAYERS, scope="module")
def test_operators_per_layer(model_type):
    _, traced, report = compiled(model_type)
    launches, left = LAYERS[model_type]
    found = last_layer(traced)
    assert found.total() == launches, found
    aten = {name for name in found if name.startswith("aten.")}
    assert aten - {"aten.split_with_sizes"} == left
    assert not [r for record in report.passes for r in record.routes for name, _ in r.refused if "attention" in name]


@pytest.mark.parametrize("model_type", GATHERED)
def test_attention_that_the_kernel_does_not_know(model_type):
    _, _, report = compiled(model_type)
    routes = [r for record in report.passes for r in record.routes if r.operator == "pagoda.paged_attention"]
    assert routes and all([reason for _, reason in r.refused] == [GATHERED[model_type]] for r in routes)
    assert all(r.chosen == ("npu.npu_scatter_pa_kv_cache", "aten") for r in routes)


def test_the_chain_that_writes_nz_caches_is_refused_with_its_reason():
    _, _, report = compiled("qwen3")
    routes = [r for record in report.passes for r in record.routes if r.operator == "pagoda.paged_attention"]
    assert routes
    for route in routes:
        ((name, reason),) = route.refused
        assert name == "npu.npu_qkv_rms_norm_rope_cache" and "number of tokens is fixed" in reason
