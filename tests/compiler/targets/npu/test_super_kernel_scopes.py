"""Super kernels of static decode graphs, through the real torchair: attributes, edges, numbers."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
import torch
from fetched_graphs import BYTES, MOST, SIZE, fetching, inputs
from scheduled_models import assert_an_engine_places, assert_static_graphs_serve, fused, prefetched
from torch import fx

from torch_pagoda.compiler.targets.npu.ge.super_kernel_scopes import OPTIONS, mark_super_kernels, placed_super_kernels
from torch_pagoda.compiler.targets.npu.schedules.graph_launches import NotPlaced
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.npu_tools.offline.decode_graphs import static_decode_graph
from torch_pagoda.npu_tools.offline.ge_graph import GeGraph, GeNode
from torch_pagoda.passes.graph.custom_notes import clear_custom_notes
from torch_pagoda.passes.graph.provenance import operator_name
from torch_pagoda.passes.schedule.schedule_prefetch import note
from torch_pagoda.passes.schedule.schedule_super_kernels import SUPER_KERNEL, SuperKernel
from torch_pagoda.passes.schedule.super_kernel_operators import FUSED

MODELS = ["llama", "gpt_neox", "qwen2_moe", "deepseek_v3"]
SCOPE, GIVEN = "_super_kernel_scope", "_super_kernel_options"


def _noted(module: fx.GraphModule, *names: str, scope: str = "s") -> fx.GraphModule:
    for node in module.graph.nodes:
        if node.name in names:
            node.meta["custom"] = {**node.meta.get("custom", {}), SUPER_KERNEL: scope}
    return module


def _linears(*, fused: bool = True) -> fx.GraphModule:
    """``fetching`` with three products a layer, one super kernel, and a fetch behind the first for the third."""
    module = fetching(weights=3)
    nodes = {node.name: node for node in module.graph.nodes}
    for node in nodes.values():
        node.meta.pop("custom", None)
    for i in (0, 1):
        note(nodes[f"m0_{i}"], nodes[f"m2_{i}"], i, "weight", BYTES, MOST)
        if fused:
            _noted(module, f"m0_{i}", f"m1_{i}", f"m2_{i}", scope=f"s{i}")
    return module


def _scope(node: GeNode) -> str:
    return str(node.schedule.get(SCOPE, ""))


def _check(graph: GeGraph, kernels: list[SuperKernel]) -> None:
    """The kernels of each scope are those of the plan, fused ones, one behind the other, with the options."""
    runs = [(scope, list(nodes)) for scope, nodes in groupby(graph.computing(), _scope)]
    scoped = [(scope, nodes) for scope, nodes in runs if scope]
    assert [scope for scope, _ in scoped] == [f"pagoda_{kernel.name}" for kernel in kernels]
    for (_, nodes), kernel in zip(scoped, kernels, strict=True):
        assert [node.type for node in nodes] == [FUSED[operator_name(each)] for each in kernel.launches]
    for node in graph:
        assert not _scope(node) or node.schedule == {SCOPE: _scope(node), GIVEN: OPTIONS}


@pytest.mark.torchair
def test_operators_of_a_super_kernel_have_a_scope_and_all_else_stays():
    found = convert(_linears(), inputs(weights=3), dynamic=False)
    other = convert(_linears(fused=False), inputs(weights=3), dynamic=False)
    assert found.count("Cmo") == 2
    scopes = [node.schedule.get(SCOPE) for node in found if node.type == "MatMul"]
    assert scopes == [None, *["pagoda_s0"] * 3, None, *["pagoda_s1"] * 3]
    assert all(not node.schedule for node in found if node.type in ("Cmo", "Sin", "Cos"))
    assert [(n.name, n.type, n.inputs, n.after) for n in found] == [
        (n.name, n.type, n.inputs, n.after) for n in other
    ]
    assert not convert(_linears(), inputs(weights=3)).schedules(), "dynamic graphs ignore them"


@pytest.mark.torchair
@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("m0_0", "m2_0"), "a kernel that is not of its super kernel lies before m2_0"),
        (("m0_0", "m0_1"), "a kernel that is not of its super kernel lies before m0_1"),
        (("b_0", "m0_0"), "b_0 is in no super kernel: no source says"),
    ],
)
def test_what_no_plan_would_note_has_no_scope(names, reason):
    module = _noted(fetching(weights=3), *names)
    before = [str(node.format_node()) for node in module.graph.nodes]
    assert mark_super_kernels(module).startswith(reason)
    assert [str(node.format_node()) for node in module.graph.nodes] == before


def test_a_part_that_is_copied_has_no_scope():
    module = _linears()
    nodes = {node.name: node for node in module.graph.nodes}
    with module.graph.inserting_before(nodes["m2_1"]):
        part = module.graph.call_function(torch.ops.aten.slice.Tensor, (nodes["m1_1"], 0, 0, SIZE))
    part.meta["val"] = nodes["m1_1"].meta["val"]
    with pytest.raises(NotPlaced, match="a kernel that is not of its super kernel lies before m2_1"):
        placed_super_kernels(module.graph)
    part.target, part.args = torch.ops.aten.view.default, (nodes["m1_1"], [SIZE, SIZE])
    assert list(placed_super_kernels(module.graph)) == ["s0", "s1"]


@pytest.mark.torchair
@pytest.mark.parametrize(
    ("model_type", "others"),
    [*((model_type, {}) for model_type in MODELS), ("llama", {"prefetch": True}), ("qwen2_moe", {"streams": True})],
)
def test_static_graphs_have_the_super_kernels_of_the_plan(model_type, others):
    traced, kernels, _ = fused(model_type, **others)
    graph = static_decode_graph(traced)
    if others.get("prefetch"):
        without = prefetched(model_type, "ge")[0]
    else:
        without = fused(model_type, **others)[0]
        clear_custom_notes(without.graph, SUPER_KERNEL)
    plain = static_decode_graph(without)
    assert kernels and not any(SCOPE in node.schedule for node in plain)
    if others.get("streams"):
        assert any("_user_stream_label" in node.schedule for node in graph)
        assert {_scope(node) for node in graph} - {""} == {f"pagoda_{kernel.name}" for kernel in kernels}
        types = Counter(FUSED[operator_name(each)] for kernel in kernels for each in kernel.launches)
        assert Counter(node.type for node in graph.computing() if _scope(node)) == types
    else:
        _check(graph, kernels)
    assert [(n.name, n.type, n.inputs, n.after) for n in graph] == [
        (n.name, n.type, n.inputs, n.after) for n in plain
    ]
    assert len(graph.cache_copies()) == len(plain.cache_copies())
    assert not any(SCOPE in node.schedule for node in graph if node.type in ("Cmo", "FusedInferAttentionScore"))
    assert not any({SCOPE, "_user_stream_label"} <= set(node.schedule) for node in graph)


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", MODELS)
def test_static_graphs_with_super_kernels_serve_the_same(model_type):
    assert_static_graphs_serve(fused(model_type)[0], "mark_super_kernels")


@pytest.mark.torchair
def test_an_engine_fuses_and_says_what_it_cannot(monkeypatch, caplog):
    assert assert_an_engine_places("super_kernels", "mark_super_kernels", monkeypatch, caplog).matches == 3
