"""Whole models through the real torchair: every node converts, no cache is copied, launches and attributes."""

from __future__ import annotations

import struct
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_calls import illegal_calls

from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.graph.provenance import decoder_layers
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from hf_reference import forced
from legal_models import build_legal_model

pytestmark = pytest.mark.torchair

# Architecture → most kernel launches of a decoder layer.
MOST_LAUNCHES = {
    "llama": 11,
    "qwen2": 11,
    "qwen3": 13,
    "mistral": 11,
    "gemma3_text": 17,
    "phi3": 11,
    "gpt2": 10,
    "gpt_neox": 15,  # in the first layer: the others read its tables
    "opt": 14,
    "falcon": 11,
    "mixtral": 19,
    "qwen3_moe": 19,
    "gpt_oss": 19,
    "glm4": 20,
    "olmo2": 17,
    "cohere": 12,
    "starcoder2": 11,
    "granite": 15,
}
GATHERED = ("gemma2", "bloom")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=8)
OTHERS = ("deepseek_v3", "deepseek_v2", "gemma3n_text")  # the last two have tables of complex numbers, and literals
MODELS = (*MOST_LAUNCHES, *GATHERED, *OTHERS)


@cache
def converted(model_type, soc="Ascend910B3"):
    """The lowered graph and what torchair makes of it."""
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    options = CompileOptions(codegen="none", target="npu", verify="off", soc=soc)
    traced = run_pipeline(capture(model), options, None, CompileReport(model_type))
    return traced, convert(traced.module, [value(n) for n in traced.placeholders], soc=soc)


def launches(traced, graph):
    """Operators of each decoder layer that launch a kernel; those that take the asked rows left out."""
    layers = decoder_layers(traced.graph)
    of = {node.name: layer for node, layer in layers.of.items()}
    found = [Counter() for _ in layers.paths]
    picks = {n.name for n in traced.graph.nodes if "index_select" in str(n.target)}
    for node in graph.computing():
        if node.origin in of and node.origin not in picks:
            found[of[node.origin]][node.type] += 1
    return found


@pytest.mark.parametrize("model_type", MODELS, scope="module")
def test_converts_without_copies_of_a_cache(model_type):
    traced, graph = converted(model_type)
    assert len(traced.caches) > 1
    caches = [n.name for n in traced.placeholders if "_cache_" in n.name]
    assert len(caches) == 2 * len(traced.caches)
    assert set(caches) <= set(graph.inputs)
    assert graph.cache_copies(*caches) == []
    for name in caches:  # whole, one writer
        writers = [n for n in graph if name + ":0" in n.inputs.values() and n.in_place]
        assert len(writers) == 1 and not writers[0].is_view


@pytest.mark.parametrize("model_type", MOST_LAUNCHES, scope="module")
def test_launches_per_layer(model_type):
    found = launches(*converted(model_type))
    assert max(layer.total() for layer in found) <= MOST_LAUNCHES[model_type], found
    assert not any(layer["Transpose"] or layer["TensorMove"] for layer in found), found


@pytest.mark.parametrize("model_type", MOST_LAUNCHES, scope="module")
def test_attributes_of_attention(model_type):
    traced, graph = converted(model_type)
    calls = [n for n in traced.graph.nodes if "infer_attention" in str(n.target)]
    nodes = {n.origin: n for n in graph.of_type("FusedInferAttentionScore")}
    assert len(calls) == len(nodes) == len(decoder_layers(traced.graph).paths)
    for call in calls:
        node, kwargs = nodes[call.name], call.kwargs
        found = node.attributes
        for name in ("input_layout", "sparse_mode", "block_size", "pre_tokens", "next_tokens", "inner_precise"):
            assert found[name] == kwargs[name], name
        assert found["input_layout"] == "TND" and found["block_size"] == 128
        assert found["num_heads"] == kwargs.get("num_heads", kwargs.get("num_query_heads"))
        assert found["num_key_value_heads"] == kwargs["num_key_value_heads"]
        scale = kwargs.get("scale", kwargs.get("softmax_scale"))
        assert struct.pack("f", found["scale"]) == struct.pack("f", scale)
        # Lengths of all sequences arrive as one list on the host, cumulative for queries.
        assert node.inputs["actual_seq_lengths"].startswith("query_ends[0:")
        assert node.inputs["actual_seq_lengths_kv"].startswith("kv_lens[0:")
        assert node.inputs["atten_mask"] == "npu_causal_mask:0"
        assert node.inputs["block_table"] == "block_table:0"
        written = graph.source(node, "key0")  # read after the write, from the cache itself
        assert written.type == "ScatterPaKvCache" and graph.source(node, "value0") is written
        assert written.inputs["key_cache"].startswith("key_cache_")
        assert written.inputs["value_cache"].startswith("value_cache_")
    windows = {n.attributes["sparse_mode"] for n in nodes.values()}
    assert windows == ({3, 4} if model_type in ("gemma3_text", "gpt_oss") else windows & {3, 4})


@pytest.mark.parametrize("model_type", MODELS, scope="module")
def test_attributes_of_the_rest(model_type):
    traced, graph = converted(model_type)
    by_origin = {}
    for node in graph:
        by_origin.setdefault(node.origin, []).append(node)
    checked = Counter()
    for call in traced.graph.nodes:
        name = str(call.target)
        nodes = [n for n in by_origin.get(call.name, []) if n in graph.computing()]
        if "npu_scatter_pa_kv_cache" in name:
            (node,) = nodes
            assert node.type == "ScatterPaKvCache" and node.attributes["cache_mode"] == "Norm"
        elif "rms_norm" in name:
            (node,) = nodes
            assert node.attributes["epsilon"] == pytest.approx(call.args[-1])
        elif "npu_rotary_mul" in name:
            (node,) = nodes
            # RotaryMul has no mode: it is for halves alone, of all dims.
            interleaved = call.args[3] == "interleave"
            by_matrix = (*call.args[4:5], call.kwargs.get("rotate"))[0] is not None
            assert node.type == ("RotaryPositionEmbedding" if by_matrix else "RotaryMul")
            assert not by_matrix or (node.attributes["mode"] == interleaved and "rotate" in node.inputs)
        elif "npu_linear" in name:
            (node,) = nodes
            assert node.type == "MatMul" and node.attributes["transpose_x2"] is True
        elif "npu_geglu" in name:
            (node,) = nodes
            assert node.attributes["activate_left"] is True
        elif "npu_gelu" in name:
            (node,) = nodes
            assert node.attributes["approximate"] == call.kwargs["approximate"]
        elif "npu_grouped_matmul" in name:
            (node,) = nodes
            assert (node.attributes["group_list_type"], node.attributes["split_item"]) == (1, 3)
        elif "npu_add_layer_norm" in name:
            (node,) = nodes
            assert node.attributes["additional_output"] is True
        else:
            continue
        checked[name] += 1
    assert checked.total() > 6


@pytest.mark.parametrize("soc", ["Ascend910_9382", "Ascend950PR"])
@pytest.mark.parametrize("model_type", ["llama", "cohere"])
def test_other_chips(model_type, soc):
    traced, graph = converted(model_type, soc)
    assert illegal_calls(traced, traced.npu) == []
    assert graph.cache_copies() == []
    rotations = graph.of_type("RotaryPositionEmbedding")
    if soc == "Ascend950PR":
        assert {n.attributes["mode"] for n in rotations} == {1 if model_type == "cohere" else 0}
        assert all("rotate" not in n.inputs for n in rotations)


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.integers(1, 4),
    dim=st.sampled_from([16, 40, 64, 80, 96, 128, 256]),
    kind=st.sampled_from(["llama", "qwen3", "mistral", "cohere", "gemma3_text", "gpt_neox", "gpt_oss"]),
    half=st.sampled_from([torch.bfloat16, torch.float16]),
    block_size=st.sampled_from([16, 128, 512]),
)
def test_whatever_is_emitted_passes_the_real_meta_functions(kv_heads, group, dim, kind, half, block_size):
    from tiny_models import build_tiny_model

    heads = kv_heads * group
    model = build_tiny_model(
        kind,
        dtype=half,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        hidden_size=heads * dim,
    )
    options = CompileOptions(codegen="none", target="npu", verify="off", block_size=block_size)
    report = CompileReport(kind)
    # In this process the fakes are torch_npu's own meta functions: a call that they refuse raises.
    traced = run_pipeline(capture(model), options, None, report)
    torch._dynamo.reset()
    assert not report.dropped_passes
    assert illegal_calls(traced, traced.npu) == []
    assert any(str(n.target).startswith("npu.") for n in traced.graph.nodes)


@pytest.mark.parametrize("model_type", MODELS, scope="module")
def test_bfloat16_numbers(model_type):
    """The lowered graph by the reference kernels is as close to the answer in float32 as transformers in bfloat16.

    In mixtures of experts rounding sends a token to another expert now and then, in both; there the typical error
    is compared.
    """
    traced, _ = converted(model_type)
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    exact = build_legal_model(model_type, dtype=torch.bfloat16).float()
    program = link(traced.copy(), traced.copy().module)
    engine = Engine(program, block_size=128, num_blocks=8, max_num_batched_tokens=19)
    prompts = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 5, 23)]
    ours, theirs = [], []
    for output in engine.generate(prompts, GREEDY):
        (completion,) = output.outputs
        truth = forced(exact, output.prompt_token_ids, completion.token_ids).logprobs
        rounded = forced(model, output.prompt_token_ids, completion.token_ids).logprobs
        for row, rounded_row, reported in zip(truth, rounded, completion.logprobs, strict=True):
            ours += [entry.logprob - float(row[token_id]) for token_id, entry in reported.items()]
            theirs += [float(rounded_row[token_id] - row[token_id]) for token_id in reported]
    has_experts = any("experts" in name for name, _ in model.named_modules())
    error, allowed = (
        float(torch.tensor(errors).abs().median() if has_experts else torch.tensor(errors).square().mean().sqrt())
        for errors in (ours, theirs)
    )
    assert error < (2.5 if has_experts else 1.4) * allowed + 0.002
