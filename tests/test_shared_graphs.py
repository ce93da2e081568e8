"""The graphs that tests share are those that compiling anew would make, and never another model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from torch_pagoda.compiler import CompileOptions, build, options, pass_runs, pipeline
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.capture import aten, trace
from torch_pagoda.compiler.options import selected_passes
from torch_pagoda.compiler.verify.self_check import compared_steps, reference_of_model
from torch_pagoda.passes import PASSES, Pass, PassRecord
from torch_pagoda.passes.graph.record import NoMatch
from torch_pagoda.passes.recognize import rms_norm
from torch_pagoda.runtime.npu_target import NpuTarget

import graphs_on_disk
import shared_graphs
from graphs_on_disk import GraphsOnDisk
from tiny_models import build_tiny_model

ALL = {"capture": 1, "passes": 3, "aten": 1}
"""Passes on Dynamo's graph, and on the ATen graph in front of the first for one target and from there."""
NONE = dict.fromkeys(ALL, 0)


@pytest.fixture(autouse=True)
def nothing_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_graphs, "_on_disk", None)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[torch.Tensor, dict[str, int]]]:
    """Compiles a model, from an empty cache at first; its logits, which have to be transformers', and how often a
    graph was shared."""
    monkeypatch.setattr(shared_graphs, "_kept", {})

    def compile_(model: nn.Module, **options: Any) -> tuple[torch.Tensor, dict[str, int]]:
        before = dict(shared_graphs.hits)
        program = build_program(model, CompileOptions(codegen="none", verify="off", **options))
        tolerance = 1e-3 if "kv_cache_dtype" not in options else 10.0
        rows = []
        for _, found, right in compared_steps(program, reference_of_model(model)):
            torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)
            rows.append(found.clone())  # the next step may write where it lies
        return torch.cat(rows), {name: count - before[name] for name, count in shared_graphs.hits.items()}

    return compile_


@pytest.mark.parametrize("kind", ["llama", "bloom", "deepseek_v3"])
def test_shared_graphs_are_those_of_compiling_anew(kind, compiled, monkeypatch):
    first, hits = compiled(build_tiny_model(kind))
    assert hits == NONE
    second, hits = compiled(build_tiny_model(kind))
    assert hits == ALL
    with monkeypatch.context() as patch:
        patch.setattr(build, "capture", trace.capture)
        for module in (pass_runs, pipeline):
            patch.setattr(module, "run_passes", shared_graphs.run_passes_anew)
        patch.setattr(pipeline, "to_aten", aten.to_aten)
        anew, hits = compiled(build_tiny_model(kind))
    assert hits == NONE
    assert torch.equal(first, anew) and torch.equal(second, anew)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "deepseek_v3", "qwen3_5_text"])
def test_graphs_from_a_disk_are_those_of_compiling_anew(kind, compiled, monkeypatch, tmp_path):
    anew, _ = compiled(build_tiny_model(kind))
    monkeypatch.setattr(shared_graphs, "_on_disk", GraphsOnDisk(tmp_path))
    monkeypatch.setattr(shared_graphs, "_kept", {})
    captured = shared_graphs.capture(build_tiny_model(kind)).traced
    monkeypatch.setattr(shared_graphs, "_kept", {})
    loaded = shared_graphs.capture(build_tiny_model(kind)).traced
    assert [describe(n) for n in loaded.graph.nodes] == [describe(n) for n in captured.graph.nodes]
    monkeypatch.setattr(shared_graphs, "_kept", {})
    found, hits = compiled(build_tiny_model(kind))
    assert hits == {**NONE, "capture": 1}
    assert torch.equal(found, anew)


def describe(node: torch.fx.Node) -> tuple[Any, ...]:
    example = node.meta.get("example_value")
    layout = None
    if isinstance(example, torch.Tensor):
        layout = example.dtype, str(tuple(example.shape)), str(example.stride()), str(example.storage_offset())
    return (
        node.format_node(),
        node.target,
        layout,
        str(node.meta.get("nn_module_stack")),
        node.meta.get("stack_trace"),
    )


def test_graphs_of_other_sources_are_removed(monkeypatch, tmp_path):
    kept = GraphsOnDisk(tmp_path)
    kept.save("key", trace.capture(build_tiny_model("llama")).traced, {"weight": torch.ones(2)}, None)
    graph, tensors, more = GraphsOnDisk(tmp_path).load("key")
    assert graph.input_ids and tensors["weight"].tolist() == [1, 1] and more is None
    monkeypatch.setattr(graphs_on_disk, "_digest_of_sources", lambda: "another")
    other = GraphsOnDisk(tmp_path)
    assert other.load("key") is None
    assert [folder.name for folder in tmp_path.iterdir()] == ["another"]


def test_options_choose_passes_on_a_shared_graph(compiled):
    model = build_tiny_model("llama", num_hidden_layers=1)
    compiled(model)
    same = {**ALL, "passes": 1}
    assert compiled(model, opt_level=0)[1] == same, "its weights were merged, which changes none of them"
    assert compiled(model, kv_cache_dtype="int8")[1] == {**NONE, "capture": 1}, "other caches are other graphs"
    assert compiled(model, passes={"skip": ["gather_logits"]})[1] == {**NONE, "capture": 1}


def test_chips_share_what_is_not_lowered_for_them(monkeypatch):
    """Shared passes ask no more than whether there is one."""
    monkeypatch.setattr(shared_graphs, "_kept", {})
    lowered: list[list[str | None]] = []
    hits: dict[str, int] = {}
    for target in (object(), NpuTarget(block_size=16), NpuTarget("Ascend950PR", graph_mode="aclgraph")):
        captured = shared_graphs.capture(build_tiny_model("gemma3_text"))
        captured.traced.npu = target
        options = CompileOptions(target="npu", verify="off")
        shared_graphs.run_passes(captured.traced, selected_passes(options, "dynamo"))
        graph = shared_graphs.to_aten(captured.traced, captured.context)
        shared_graphs.run_passes(graph, [entry for entry in selected_passes(options, "aten") if not entry.target])
        assert graph.npu is target
        lowered.append([node.format_node() for node in graph.graph.nodes])
        hits = hits or dict(shared_graphs.hits)
    assert lowered[0] == lowered[1] == lowered[2]
    found = {name: count - hits[name] for name, count in shared_graphs.hits.items()}
    assert found == {"capture": 2, "passes": 4, "aten": 2}


def test_a_patched_pass_runs(compiled, monkeypatch):
    model = build_tiny_model("llama", num_hidden_layers=1)
    compiled(model)

    def refuse(*given):
        raise NoMatch("a test says so")

    monkeypatch.setattr(rms_norm, "follow_scale", refuse)
    assert compiled(model)[1] == {**NONE, "capture": 1}


def attribute(model):
    model.model.layers[0].self_attn.scaling *= 1.5


def activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)


def patched(model):
    modeling_llama.LlamaMLP.forward = lambda self, x: self.down_proj(self.up_proj(x))


@pytest.mark.parametrize("change", [attribute, activation, hook, patched], ids=lambda f: f.__name__)
def test_a_changed_model_is_another(change, compiled, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", modeling_llama.LlamaMLP.forward)
    compiled(build_tiny_model("llama", num_hidden_layers=1))
    model = build_tiny_model("llama", num_hidden_layers=1)
    change(model)
    _, hits = compiled(model)
    assert hits == NONE


def test_other_weights_go_through_the_passes(compiled):
    for seed, hits in ((0, NONE), (1, {**NONE, "capture": 1})):
        assert compiled(build_tiny_model("llama", seed=seed, num_hidden_layers=1))[1] == hits


def test_programs_read_their_own_models_tensors(compiled):
    one, other = (build_tiny_model("llama", num_hidden_layers=1) for _ in range(2))
    programs = [build_program(model, CompileOptions(codegen="none", verify="off")) for model in (one, other)]
    with torch.no_grad():
        one.lm_head.weight.mul_(2)
    reference = reference_of_model(other)
    first, second = ([found.clone() for _, found, _ in compared_steps(program, reference)] for program in programs)
    torch.testing.assert_close(first, [2 * rows for rows in second])


def test_a_pass_that_is_not_the_products_runs(compiled, monkeypatch):
    runs = []

    def counted(graph):
        runs.append(graph)
        return PassRecord("counted")

    compiled(build_tiny_model("llama", num_hidden_layers=1))
    monkeypatch.setattr(options, "PASSES", (*PASSES, Pass("counted", counted, required=False)))
    compiled(build_tiny_model("llama", num_hidden_layers=1))
    assert len(runs) == 1
