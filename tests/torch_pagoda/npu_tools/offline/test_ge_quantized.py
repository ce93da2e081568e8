"""Quantized graphs through the real torchair: node types, attributes, launches, no weight cast or turned."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from npu_calls import illegal_calls
from quantized_graphs import stored
from torch import fx

from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.graph.provenance import decoder_layers

from legal_models import build_legal_model

pytestmark = pytest.mark.torchair

_PRODUCTS = ("QuantBatchMatmulV3", "QuantBatchMatmulV4", "WeightQuantBatchMatmulV2")
BF16, FP16 = 27, 1
"""As GE counts dtypes."""


@cache
def converted(model_type, dtype=torch.bfloat16, quantization="int8", **overrides):
    """The lowered graph and what torchair makes of it."""
    model = build_legal_model(model_type, dtype=dtype, **overrides)
    options = CompileOptions(codegen="none", target="npu", verify="off", quantization=quantization)
    traced = run_pipeline(capture(model), options, None, CompileReport(model_type))
    return traced, convert(traced.module, [value(n) for n in traced.placeholders])


def launches(traced, graph):
    """Operators of each decoder layer that launch a kernel; those that take the asked rows left out."""
    layers = decoder_layers(traced.graph)
    of = {node.name: layer for node, layer in layers.of.items()}
    found = [Counter() for _ in layers.paths]
    picks = {n.name for n in traced.graph.nodes if "order" not in n.name and "index_select" in str(n.target)}
    for node in graph.computing():
        if node.origin in of and node.origin not in picks:
            found[of[node.origin]][node.type] += 1
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_llama_layer(dtype):
    traced, graph = converted("llama", dtype)
    assert illegal_calls(traced, traced.npu) == []
    first, second = launches(traced, graph)
    assert second == {
        "AddRmsNormDynamicQuant": 2,
        "QuantBatchMatmulV3": 4,
        "ApplyRotaryPosEmb": 1,
        "ScatterPaKvCache": 1,
        "FusedInferAttentionScore": 1,
        "DynamicQuant": 1,
        "DequantSwigluQuant": 1,
        **({"SplitV": 1} if "SplitV" in second else {}),
    }
    assert second.total() - second["SplitV"] == 11 and first.total() - first["SplitV"] == 12
    caches = [n.name for n in traced.placeholders if "_cache_" in n.name]
    assert graph.cache_copies(*caches) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attributes(dtype):
    traced, graph = converted("qwen2", dtype)
    made = {name for inputs in traced.notes.quantized for name in inputs.made}
    products = graph.of_type("QuantBatchMatmulV3")
    assert len(products) == 9
    for node in products:
        assert node.attributes["dtype"] == (BF16 if dtype is torch.bfloat16 else FP16)
        assert node.attributes["transpose_x1"] is node.attributes["transpose_x2"] is False
        # Straight from the inputs: nothing casts, turns or copies a weight.
        for name in ("x2", "scale"):
            assert node.inputs[name].removesuffix(":0") in made
        assert "pertoken_scale" in node.inputs
    assert sum("bias" in node.inputs for node in products) == 2
    for node in graph.of_type("DequantSwigluQuant"):
        assert node.attributes["activate_left"] is True and node.attributes["quant_mode"] == "dynamic"
    for node in graph.of_type("AddRmsNormDynamicQuant"):
        assert node.attributes["epsilon"] == pytest.approx(1e-6)


def test_experts():
    traced, graph = converted("qwen3_moe", moe_intermediate_size=128)
    assert illegal_calls(traced, traced.npu) == []
    _, second = launches(traced, graph)
    experts = ("MoeInitRoutingV3", "GroupedMatmulSwigluQuantV2", "GroupedMatmul", "MoeFinalizeRoutingV2")
    assert {name: second[name] for name in experts} == dict.fromkeys(experts, 1), second
    assert not second["DequantSwigluQuant"]
    made = {name for inputs in traced.notes.quantized for name in inputs.made}
    for node in graph.of_type("MoeInitRoutingV3"):
        assert node.attributes["quant_mode"] == 1
    for node in graph.of_type("GroupedMatmul"):
        assert node.attributes["dtype"] == 1, "bfloat16, as this operator counts"
        assert (node.attributes["group_list_type"], node.attributes["split_item"]) == (1, 3)
        assert node.inputs["weight0"].removesuffix(":0") in made and node.inputs["scale0"].removesuffix(":0") in made
    fused = graph.of_type("GroupedMatmulSwigluQuantV2")
    assert len(fused) == 2
    for node in fused:
        modes = ("dequant_mode", "dequant_dtype", "quant_mode", "group_list_type", "transpose_weight")
        assert [node.attributes[name] for name in modes] == [0, 0, 0, 1, False], "0: float32, as GE counts"
        assert node.attributes["quant_dtype"] == 2, "int8"
        assert node.inputs["weight0"].removesuffix(":0") in made
        assert node.inputs["weight_scale0"].removesuffix(":0") in made


def test_the_fused_product_of_one_size():
    """Graphs of decode steps have no dynamic sizes."""

    def step(x, weight, scale, of_rows, counts):
        found = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2.default(
            x, [weight], [scale], of_rows, counts, group_list_type=1
        )
        return found[0], found[1]

    inputs = [
        torch.zeros(8, 64, dtype=torch.int8),
        torch.zeros(2, 64, 128, dtype=torch.int8),
        torch.ones(2, 128),
        torch.ones(8),
        torch.tensor([3, 5]),
    ]
    graph = convert(fx.symbolic_trace(step), inputs, dynamic=False)
    (node,) = graph.of_type("GroupedMatmulSwigluQuantV2")
    assert node.attributes["group_list_type"] == 1 and node.attributes["quant_dtype"] == 2
    assert node.attributes["dequant_dtype"] == 0, "float32, though torchair's converter means uint8 by itself"
    as_it_is = convert(fx.symbolic_trace(step), inputs, dynamic=False, own_converters=False)
    assert as_it_is.of_type("GroupedMatmulSwigluQuantV2")[0].attributes["dequant_dtype"] == 4


STATIC = {
    "slim-w8a8-static": ({"x", "scales", "zero_points"}, "int32"),
    "ct-w8a8-static": ({"x", "scales"}, ""),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", STATIC)
def test_inputs_whose_rounding_is_given(name, dtype):
    _, traced, _ = stored("llama", name, dtype=dtype)
    graph = convert(traced.module, [value(n) for n in traced.placeholders])
    assert illegal_calls(traced, traced.npu) == []
    _, second = launches(traced, graph)
    assert second["Quantize"] == 2 and second["QuantBatchMatmulV3"] == 4, second
    assert second["AddRmsNormQuant"] == 2
    assert second.total() - second["SplitV"] == 12 and not second["DynamicQuant"], second
    made = {name for inputs in traced.notes.quantized for name in inputs.made}
    for node in graph.of_type("QuantBatchMatmulV3"):
        assert node.attributes["dtype"] == (BF16 if dtype is torch.bfloat16 else FP16)
        assert node.inputs["x2"].removesuffix(":0") in made and "pertoken_scale" not in node.inputs
        assert ("bias" in node.inputs) == name.startswith("slim")
    for node in graph.of_type("Quantize"):
        assert node.attributes["dtype"] == "torch.qint8" and node.inputs.keys() == STATIC[name][0]
    of_norms = {"x1", "x2", "gamma", "scales1"} | ({"zero_points1"} if name.startswith("slim") else set())
    for node in graph.of_type("AddRmsNormQuant"):
        assert node.inputs.keys() == of_norms and node.attributes["axis"] == -1
        assert node.attributes["epsilon"] == pytest.approx(1e-6) and node.attributes["div_mode"] is True
    caches = [n.name for n in traced.placeholders if "_cache_" in n.name]
    assert graph.cache_copies(*caches) == []


def check_experts(traced, graph, names):
    """The launches of a layer's experts, and matrices, scales and sums that come straight from inputs."""
    assert illegal_calls(traced, traced.npu) == []
    _, second = launches(traced, graph)
    found = {name: second[name] for name in names}
    assert found == names and sum(found.values()) == 5, second
    made = {name for inputs in traced.notes.quantized for name in inputs.made}
    views = {node.name: node for node in graph.nodes if node.is_view}

    def source(name):
        while (at := name.rpartition(":")[0] or name) in views:
            name = next(iter(views[at].inputs.values()))
        return name.removesuffix(":0")

    works = [node for node in graph.nodes if not (node.is_view or node.host)]
    readers = {node.type for node in works if made & set(map(source, node.inputs.values()))}
    assert readers <= {"GroupedMatmul", *_PRODUCTS}, "nothing casts, turns or copies a weight, a scale or a sum"
    for node in graph.of_type("GroupedMatmul"):
        read = {name: source(node.inputs[name]) for name in node.inputs}
        assert read["weight0"] in made
        yield node, {name for name, at in read.items() if at in made}


@pytest.mark.parametrize("quantization", ["int8-weight-only", "int4-weight-only"])
def test_experts_whose_inputs_keep_16_bits(quantization):
    traced, graph = converted("qwen3_moe", quantization=quantization, moe_intermediate_size=256)
    names = {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "SwiGlu": 1, "MoeFinalizeRoutingV2": 1}
    for node, made in check_experts(traced, graph, names):
        assert made == {"weight0", "antiquant_scale0", "antiquant_offset0"}
        assert node.attributes["transpose_weight"] is False and node.attributes["group_list_type"] == 1


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend950PR"])
def test_w4a8_experts(soc):
    _, traced, _ = stored("qwen3_moe", "slim-w4a8-experts", dtype=torch.bfloat16, soc=soc)
    graph = convert(traced.module, [value(n) for n in traced.placeholders], soc=soc)
    swiglu = "DequantSwigluQuant" if soc == "Ascend910B3" else "SwiGlu"
    names = {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, swiglu: 1, "MoeFinalizeRoutingV2": 1}
    for node, made in check_experts(traced, graph, names):
        assert made == {"weight0", "scale0", "bias0"}
        assert node.attributes["dtype"] == 1, "bfloat16, as this operator counts"
        assert "per_token_scale" in node.inputs
        (named,) = [n for n in graph.nodes if n.name == node.inputs["scale0"].rpartition(":")[0]]
        assert named.type == "Bitcast", "int64 is read as uint64 where it lies"


def test_w4a8_experts_in_groups():
    _, traced, _ = stored("qwen3_moe", "slim-w4a8-g256", dtype=torch.bfloat16, moe_intermediate_size=512)
    graph = convert(traced.module, [value(n) for n in traced.placeholders])
    names = {"MoeInitRoutingV3": 1, "GroupedMatmul": 2, "DequantSwigluQuant": 1, "MoeFinalizeRoutingV2": 1}
    for node, made in check_experts(traced, graph, names):
        assert made == {"weight0", "scale0", "bias0"} and node.attributes["group_list_type"] == 1
        (named,) = [n for n in graph.nodes if n.name == node.inputs["scale0"].rpartition(":")[0]]
        assert named.type == "Bitcast", "int64 is read as uint64 where it lies"
    made = {inputs.scales: inputs for inputs in traced.notes.quantized if inputs.sums}
    assert {value(traced.placeholder(name)).dim() for name in made} == {3}


@pytest.mark.parametrize("size", [128, 256])
def test_w4a8_linears_in_groups_keep_16_bits(size):
    _, traced, _ = stored("llama", f"slim-w4a8-g{size}", dtype=torch.bfloat16, intermediate_size=512)
    graph = convert(traced.module, [value(n) for n in traced.placeholders])
    assert illegal_calls(traced, traced.npu) == []
    _, second = launches(traced, graph)
    assert second["WeightQuantBatchMatmulV2"] == 4 and second.total() - second["SplitV"] == 10, second
    assert {n.attributes["antiquant_group_size"] for n in graph.of_type("WeightQuantBatchMatmulV2")} == {size}


def test_why_graphs_have_no_product_of_int8_by_4_bits():
    """Torchair drops the groups, and hands 4 bits on as the int32 that hold them."""

    def product(x, weight, scale, offset, rows):
        given = {"offset": offset, "pertoken_scale": rows, "output_dtype": 15, "group_sizes": [0, 0, 256]}
        return torch.ops.npu.npu_quant_matmul(x, weight, scale, **given)

    sizes = {"x": ((5, 512), torch.int8), "weight": ((512, 2), torch.int32), "scale": ((2, 16), torch.int64)}
    sizes |= {"offset": ((16,), torch.float32), "rows": ((5, 1), torch.float32)}
    inputs = [torch.ones(size, dtype=dtype) for size, dtype in sizes.values()]
    graph = convert(fx.symbolic_trace(product), inputs, dynamic=False)
    (node,) = graph.of_type("QuantBatchMatmulV3")
    assert node.attributes.keys() == {"dtype", "transpose_x1", "transpose_x2"}
    assert node.inputs["x2"] == "weight:0" and not graph.of_type("Bitcast")


@pytest.mark.parametrize("soc", ["Ascend910_9382", "Ascend950PR"])
def test_other_chips(soc):
    model = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    options = CompileOptions(codegen="none", target="npu", verify="off", quantization="int8", soc=soc)
    traced = run_pipeline(capture(model), options, None, CompileReport("llama"))
    graph = convert(traced.module, [value(n) for n in traced.placeholders], soc=soc)
    assert illegal_calls(traced, traced.npu) == []
    name = "QuantBatchMatmulV4" if soc == "Ascend950PR" else "QuantBatchMatmulV3"
    assert len(graph.of_type(name)) == 5
    assert bool(graph.of_type("DequantSwigluQuant")) == (soc != "Ascend950PR")


def test_a_program_by_the_graph_engine():
    model = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    report = CompileReport("llama")
    build_program(model, CompileOptions(target="npu", codegen="ge", quantization="int8"), report=report)
    assert report.codegen == "ge" and report.verdict is not None and report.verdict.ok


def test_torchairs_own_fusions_find_nothing_more():
    model = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    options = CompileOptions(codegen="none", target="npu", verify="off", quantization="int8")
    traced = run_pipeline(capture(model), options, None, CompileReport("llama"))
    inputs = [value(n) for n in traced.placeholders]
    plain, fused = (convert(traced.module, inputs, fusions=on) for on in (False, True))
    assert Counter(node.type for node in plain.computing()) == Counter(node.type for node in fused.computing())


@pytest.mark.parametrize("quantization", ["int8-weight-only", "int4-weight-only"])
def test_weights_alone(quantization):
    traced, graph = converted("qwen2", quantization=quantization)
    assert illegal_calls(traced, traced.npu) == []
    _, second = launches(traced, graph)
    assert second["WeightQuantBatchMatmulV2"] == 4 and second.total() - second["SplitV"] == 10, second
    made = {name for inputs in traced.notes.quantized for name in inputs.made} | set(traced.notes.widened)
    products = graph.of_type("WeightQuantBatchMatmulV2")
    assert len(products) == 9
    for node in products:
        assert node.attributes["transpose_x"] is node.attributes["transpose_weight"] is False
        assert node.inputs["weight"].removesuffix(":0") in made
        assert node.inputs["antiquant_scale"].removesuffix(":0") in made
        assert "bias" not in node.inputs or node.inputs["bias"].removesuffix(":0") in made
    groups = Counter(node.attributes["antiquant_group_size"] for node in products)
    # The second products of these layers have 128 inputs: all share a scale.
    assert groups == ({128: 6, 0: 3} if quantization.startswith("int4") else {0: 9})
    # Torchair turns an optimization of views off for graphs with this operator: still no cache is copied.
    caches = [n.name for n in traced.placeholders if "_cache_" in n.name]
    assert graph.cache_copies(*caches) == []
