"""The rows whose logits are asked for are taken before the last layer's own work, and nowhere too early."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_model, aten_of_tiny_model
from torch import fx

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.options import CompileOptions, selected_passes
from torch_pagoda.compiler.pass_runs import run_passes
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes.graph.fx_nodes import callee, shape
from torch_pagoda.passes.rewrite.hoist_gather import hoist_gather

from tiny_models import build_tiny_model

SKIP = CompileOptions(passes={"skip": ["hoist_gather"]})


def fused(graph):
    run_passes(graph, selected_passes(SKIP, "aten"))
    return graph


def nodes_named(graph, name) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if callee(n) == name]


def rows_of(graph):
    return shape(graph.placeholder("logits_rows"))[0]


# Products for the asked rows alone: those of the last layer behind its attention, and the head.
PRODUCTS = {"llama": 4, "gpt2": 4, "gemma2": 4, "qwen3_moe": 3, "falcon": 4, "gpt_oss": 3}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_last_layer_works_on_the_asked_rows(name):
    model = build_tiny_model(name)
    graph = fused(aten_of_model(model))
    before = [callee(n) for n in graph.graph.nodes if callee(n) != "index_select"]
    assert hoist_gather(graph).matches == 1
    assert [callee(n) for n in graph.graph.nodes if callee(n) != "index_select"] == before
    few = [n for n in nodes_named(graph, "linear") if str(rows_of(graph)) in map(str, shape(n))]
    assert len(few) == PRODUCTS[name]
    attention = nodes_named(graph, "paged_attention")[-1]
    assert all(n > attention for n in nodes_named(graph, "index_select"))
    graph.recompile()
    assert check(link(graph, graph.module), reference_of_model(model)).ok
    assert hoist_gather(graph).matches == 0


def test_what_others_need_is_computed_for_all_tokens():
    graph = fused(aten_of_tiny_model("llama"))
    activation = nodes_named(graph, "gated_activation")[-1]
    down = next(iter(activation.users))
    with graph.before(graph.output):
        extra = graph.call(torch.ops.aten.sum.default, activation)
    graph.output.args = ((*graph.output.args[0], extra),)
    assert hoist_gather(graph).matches == 1
    (gathered,) = [n for n in nodes_named(graph, "index_select") if n.args[0] is activation]
    assert down.args[0] is gathered and extra.args[0] is activation


def test_mixing_tokens_stops_it():
    graph = fused(aten_of_tiny_model("llama"))
    (gather,) = nodes_named(graph, "index_select")
    normed = gather.args[0]
    with graph.before(gather):
        running = graph.call(torch.ops.aten.cumsum.default, normed, 1)
    gather.replace_input_with(normed, running)
    code = graph.graph.python_code("self").src
    assert hoist_gather(graph).matches == 0
    assert graph.graph.python_code("self").src == code


def test_without_a_gather_nothing_happens():
    graph = fused(aten_of_tiny_model("llama"))
    (gather,) = nodes_named(graph, "index_select")
    gather.replace_all_uses_with(gather.args[0])
    graph.graph.erase_node(gather)
    assert hoist_gather(graph).matches == 0
