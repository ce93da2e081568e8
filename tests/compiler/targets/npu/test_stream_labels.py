"""Branches on a second stream of static decode graphs, through the real torchair: labels, edges, numbers."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from branched_graphs import inputs, layered
from scheduled_models import assert_static_graphs_serve, scheduled

import torch_pagoda as pagoda
from torch_pagoda.compiler.targets.npu.ge import scheduled as scheduled_graph
from torch_pagoda.compiler.targets.npu.ge.stream_labels import LABEL, label_branches
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.npu_tools.offline.decode_graphs import static_decode_graph

from legal_models import build_legal_model

MODELS = ["gpt_neox", "qwen2_moe", "deepseek_v3"]


@pytest.mark.torchair
def test_operators_of_a_branch_follow_what_they_read_with_a_label():
    plain = layered()
    for node in plain.graph.nodes:
        node.meta.clear()
    found, other = convert(layered(), inputs(), dynamic=False), convert(plain, inputs(), dynamic=False)
    assert [node.type for node in found if node.schedule] == ["Exp", "Tanh"] * 2 and not other.schedules()
    (mul, first), (sin,) = (found[name] for name in ("Mul", "Exp")), found.of_type("Sin")[:1]
    order = list(found)
    assert order.index(mul) < order.index(first) < order.index(found["Tanh"]) < order.index(sin)
    # All else is as without: operators, what each reads, and no control edges.
    assert {node.name: (node.type, node.inputs, node.after) for node in found} == {
        node.name: (node.type, node.inputs, node.after) for node in other
    }
    assert not any(node.after for node in found)
    assert not convert(layered(), inputs()).schedules(), "dynamic graphs ignore them"


@pytest.mark.torchair
@pytest.mark.parametrize("given", [{"side_reads": "cache"}, {"side_writes": True}])
def test_a_branch_that_touches_what_the_graph_writes_has_no_label(given):
    """Notes that no plan would make: after AOTAutograd the branch reads, or writes, what the graph copies back."""
    module = layered(**given)
    before = [str(node.format_node()) for node in module.graph.nodes]
    assert "touches memory that the graph writes" in label_branches(module)
    assert [str(node.format_node()) for node in module.graph.nodes] == before


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", MODELS)
def test_branches_of_static_graphs_have_a_stream_of_their_own(model_type):
    (traced, branches), (without, _) = scheduled(model_type, "ge"), scheduled(model_type, "ge", schedule=False)
    graph, plain = static_decode_graph(traced), static_decode_graph(without)
    launches = [Counter(node.type for node in each.computing()) for each in (graph, plain)]
    assert launches[0] == launches[1] and not plain.schedules()
    ((attributes, types),) = graph.schedules()
    assert attributes == {"_user_stream_label": LABEL, "_user_stream_priority": "0", "_enable_inner_parallel": True}
    sided = {node.name for node in graph if node.schedule}
    computing = [node for node in graph.computing() if node.name in sided]
    assert len(computing) >= sum(len(branch.side) for branch in branches)
    assert types["MatMul"] + types["GroupedMatmul"] >= len(branches)
    assert not {"FusedInferAttentionScore", "ScatterPaKvCache", "ScatterNdUpdate"} & set(types)
    # Streams wait for each other by data alone: control edges would stand in ``after``.
    assert not any(node.after for each in (graph, plain) for node in each)


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", MODELS)
def test_static_graphs_with_branches_serve_the_same(model_type):
    assert_static_graphs_serve(scheduled(model_type, "ge")[0], "label_branches")


@pytest.mark.torchair
def test_an_engine_runs_its_schedule():
    model = build_legal_model("gpt_neox", dtype=torch.bfloat16)
    limits = {"block_size": 16, "num_blocks": 24, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    params = pagoda.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    labeled: list[str] = []
    with mock.patch.object(
        scheduled_graph, "label_branches", lambda gm: labeled.append(label_branches(gm)) or labeled[-1]
    ):
        llm = pagoda.LLM(
            model, target="npu", codegen="ge", static_decode=True, schedule={"streams": True}, verify="off", **limits
        )
        found = [output.outputs[0].token_ids for output in llm.generate([[4, 5, 6], [7]], params)]
    record = llm.compile_report.passes[-1]
    assert (record.name, record.matches) == ("schedule_branches", 2) and labeled == [""]
    assert [size.reason for size in llm.compile_report.sizes] == ["", ""]
    plain = pagoda.LLM(model, target="npu", codegen="none", verify="off", **limits)
    assert found == [output.outputs[0].token_ids for output in plain.generate([[4, 5, 6], [7]], params)]
