"""Models with state through the real torchair: every node converts, no pool is copied, launches of a layer."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from lowered_models import assert_same, lowered, served

from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.graph.provenance import decoder_layers
from torch_pagoda.runtime.program import is_cache_input

from legal_models import build_legal_model

pytestmark = pytest.mark.torchair

# Architecture → most kernel launches of its layers that keep state.
MOST_LAUNCHES = {
    "lfm2": 30,
    "lfm2_moe": 40,
    "qwen3_5_text": 310,
    "qwen3_next": 330,
    "olmo_hybrid": 310,
    "kimi_linear": 310,
    "bailing_hybrid": 310,
    "mamba": 260,
    "jamba": 270,
    "mamba2": 215,
    "bamba": 215,
    "falcon_h1": 225,
    "nemotron_h": 215,
    "granitemoehybrid": 230,
}
SERVED = ("lfm2", "qwen3_5_text", "kimi_linear", "mamba2", "jamba")


@cache
def converted(model_type):
    """The lowered graph and what torchair makes of it."""
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    options = CompileOptions(codegen="none", target="npu", verify="off")
    traced = run_pipeline(capture(model), options, None, CompileReport(model_type))
    return traced, convert(traced.module, [value(n) for n in traced.placeholders])


@pytest.mark.parametrize("model_type", MOST_LAUNCHES, scope="module")
def test_converts_without_copies_of_a_pool(model_type):
    traced, graph = converted(model_type)
    caches = [n.name for n in traced.placeholders if is_cache_input(n.name)]
    assert set(caches) <= set(graph.inputs)
    assert graph.cache_copies(*caches) == [] and graph.count("TensorMove") == 0
    for name in caches:
        readers = [n for n in graph if name + ":0" in n.inputs.values()]
        assert [n.in_place for n in readers if n.type == "ScatterNdUpdate"] == [{"0": "var"}] * ("_state_" in name)
        assert len(readers) == (2 if "_state_" in name else 1), "the slots of the step are gathered, then written"


@pytest.mark.parametrize("model_type", MOST_LAUNCHES, scope="module")
def test_launches_of_a_layer_with_state(model_type):
    traced, graph = converted(model_type)
    layers = decoder_layers(traced.graph)
    of = {node.name: layer for node, layer in layers.of.items()}
    stateful = {of[n.name] for n in traced.graph.nodes if "npu_scatter_nd_update_" in str(n.target)}
    found = [sum(of.get(node.origin) == layer for node in graph.computing()) for layer in stateful]
    assert found and max(found) <= MOST_LAUNCHES[model_type], found


@pytest.mark.parametrize("model_type", SERVED, scope="module")
def test_the_graph_engine_route_serves_the_same(model_type):
    """What torchair converted runs operator by operator, and writes into the pools that it was given."""
    _, traced = lowered(model_type)
    assert_same(served(traced, GeGraphs(traced)), served(traced, traced.module))
