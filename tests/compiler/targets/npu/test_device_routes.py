"""The two ways to run a lowered graph on an NPU, as far as they go without one.

Tests marked ``torchair`` go through the real torchair and npugraph_ex: what torchair converted runs on the CPU; what
npugraph_ex captures is recorded and replayed on the CPU (see ``captured_graphs``).
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from lowered_models import LIMITS, assert_same, lowered, served
from torch import fx

import torch_pagoda as pagoda
from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.flat_graph import flat_graph
from torch_pagoda.compiler.targets.npu.ge.ge_route import PREFILLED_TOKENS, GeGraphs
from torch_pagoda.compiler.targets.npu.route import ctrl_c_kept
from torch_pagoda.compiler.targets.npu.routes import make_route
from torch_pagoda.compiler.targets.npu.sizes.step_padding import StepSize
from torch_pagoda.compiler.targets.npu.weights.weights import prepare_weights
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache

from captured_graphs import captured_graphs


def ready(model_type: str = "llama", graph_mode: str = "ge", **options: Any) -> TracedGraph:
    """A lowered graph with linked weights."""
    traced = lowered(model_type, graph_mode, **options)[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    return traced


def placeholders(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]


def test_routes_by_name():
    traced = lowered()[1]
    assert isinstance(make_route("ge", traced, traced.module), GeGraphs)
    assert isinstance(make_route("aclgraph", traced, traced.module), AclGraphs)
    assert make_route("none", traced, traced.module) is None


def test_ctrl_c_stays_what_it_was():
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_kept():
        signal.signal(signal.SIGINT, lambda *_: None)
    assert signal.getsignal(signal.SIGINT) is before


# The flat form of a graph


def test_lists_become_integers_and_what_nothing_reads_is_left_out():
    traced = ready()
    flat = flat_graph(traced, 3)
    names = placeholders(flat.module)
    assert [n for n in names if "query_ends" in n] == ["query_ends_0", "query_ends_1", "query_ends_2"]
    assert not [n for n in names if "q_proj" in n and not n.startswith("merged_")], "its rows are read, not itself"
    assert len(names) == len(flat.values)
    symbols = [v.node.expr for v, n in zip(flat.values, names, strict=True) if "query_ends" in n or "kv_lens" in n]
    assert len(set(symbols)) == 6
    constants = {names[i] for i in flat.constants}
    assert "npu_causal_mask" in constants and not constants & {"slot_mapping", "key_cache_0", "query_ends_0"}
    given = [
        [7, 8, 9] if isinstance(value(node), list) else torch.ones(2, 3) if node.name == "block_table" else node.name
        for node in traced.placeholders
    ]
    flattened = flat.flatten(given)
    assert flattened[names.index("query_ends_1")] == 8 and flattened[names.index("slot_mapping")] == "slot_mapping"
    given[[n.name for n in traced.placeholders].index("kv_lens")] = [1]
    with pytest.raises(ValueError, match="lists of 3 integers, and 1 are given"):
        flat.flatten(given)


def test_sizes_and_caches_of_a_flat_graph():
    traced = ready()
    caches = [tensor for pair in allocate_kv_cache(traced.caches, 5, 16) for tensor in pair]
    flat = flat_graph(traced, 2, caches=caches, with_sizes=True)
    names = placeholders(flat.module)
    assert flat.values[names.index("key_cache_1")].shape == (5, 16, 2, 128)
    free = {
        s.node.expr for v in flat.values if isinstance(v, torch.Tensor) for s in v.shape if not isinstance(s, int)
    }
    integers = {v.node.expr for v in flat.values if isinstance(v, torch.SymInt)}
    assert free <= integers, "every symbol is an input of its own"
    at = [n.name for n in traced.placeholders]
    assert [(at[i], dim) for i, dim in flat.sizes if at[i] == "block_table"] == [
        ("block_table", 0),
        ("block_table", 1),
    ]
    assert traced.placeholder("key_cache_1").meta["example_value"].shape[0] != 5, "the traced graph is left alone"


def test_caches_of_layers_with_state_before_attention():
    traced = lowered("lfm2", "aclgraph")[1]
    bound = [tensor for entry in allocate_kv_cache(traced.caches, [5, 7], 16) for tensor in entry]
    flat = flat_graph(traced, 2, caches=bound)
    sizes = {
        n: flat.values[i].shape for i, n in enumerate(placeholders(flat.module)) if "_state_" in n or "_cache_" in n
    }
    assert sizes == {"conv_state_0": bound[0].shape, "key_cache_1": bound[1].shape, "value_cache_1": bound[2].shape}


# Which graphs are made, and which steps are captured


def test_planned_numbers_of_sequences():
    route = GeGraphs(lowered()[1])
    assert route.plan(64, 2048, 4096) == 7 and route.planned == tuple(range(8, 65, 8))
    assert route.plan(3, 18, 48) == 2 and route.planned == (3,)
    assert route.plan(256, 2048, 4096) == 31 and len(route.planned) == 8
    # Two blocks for padding, and as many as a step of 256 - 1 sequences and a chunk lies in.
    assert route.reserve(256, 2048, 4096) == 2 + -(-(255 + PREFILLED_TOKENS) // 16)
    assert route.size_for(StepSize(40, 32, 5, 9)) is None, "planned as it is"
    assert route.size_for(StepSize(40, 30, 5, 9)) == StepSize(42, 32, 5, 9)
    assert route.size_for(StepSize(300, 300, 5, 9)) is None, "above what was planned: a graph of its own"


def test_blocks_of_another_size_are_refused():
    traced = lowered()[1]
    program = link(traced, traced.module)
    with pytest.raises(ValueError, match="blocks of 8 tokens; the program was compiled for block_size=16"):
        program.bind(allocate_kv_cache(program.caches, 4, 8))


class Replayed:
    """Stands for npugraph_ex's graph: notes what it is called with, and runs the traced graph."""

    def __init__(self, traced: TracedGraph) -> None:
        self.traced, self.addresses = traced, {}
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        at = {node.name: i for i, node in enumerate(self.traced.placeholders) if node.users}
        key = tuple((name, tuple(args[i].shape)) for name, i in at.items() if isinstance(args[i], torch.Tensor))
        fixed = {name: args[i].data_ptr() for name, i in at.items() if isinstance(args[i], torch.Tensor)}
        assert self.addresses.setdefault(key, fixed) == fixed, "an address changed between two replays"
        return self.traced.module(*args)


def capturing(monkeypatch: pytest.MonkeyPatch, traced: TracedGraph, budget: int | None) -> tuple[AclGraphs, Replayed]:
    graph = Replayed(traced)
    monkeypatch.setattr(AclGraphs, "_compile", lambda self, scheduled: graph)
    return AclGraphs(traced, traced.module, budget), graph


def test_captured_steps_serve_the_same_at_fixed_addresses(monkeypatch):
    traced = ready("llama", "aclgraph")
    route, graph = capturing(monkeypatch, traced, 3)
    assert_same(served(traced, route), served(traced, traced.module))
    assert len(route.planned) == 3 and route.planned[-1] == LIMITS["max_num_batched_tokens"]
    assert {tokens for tokens, _ in route.captured} <= set(route.planned) and len(route.captured) <= 3
    assert graph.calls > len(route.captured) and not route.eager_steps


def test_sizes_of_steps(monkeypatch):
    route, _ = capturing(monkeypatch, ready("llama", "aclgraph"), 4)
    route.reserve(4, 32, 100)
    assert route.planned == (2, 4, 16, 32)
    assert route.size_for(StepSize(3, 3, 3, 2)) == StepSize(4, 5, 4, 7)
    assert route.size_for(StepSize(20, 2, 2, 7)) == StepSize(32, 5, 5, 7)
    assert route.size_for(StepSize(20, 2, 20, 7)) == StepSize(32, 5, 32, 7), "more rows than sequences are asked"
    assert route.size_for(StepSize(4, 1, 1, 1)) == StepSize(4, 5, 4, 7)
    assert not route.eager_steps
    assert [route.size_for(StepSize(*s)) for s in ((33, 4, 4, 1), (5, 5, 5, 1), (3, 1, 1, 8))] == [None] * 3
    assert sum(route.eager_steps.values()) == 3 and "larger than planned" in next(iter(route.eager_steps))


def test_steps_beyond_the_budget_run_eagerly_and_say_so(monkeypatch, caplog):
    traced = ready("llama", "aclgraph")
    route, _ = capturing(monkeypatch, traced, 3)
    real = AclGraphs.plan

    def plan(self, *limits):
        padding = real(self, *limits)
        self._budget = 1
        return padding

    monkeypatch.setattr(AclGraphs, "plan", plan)
    with caplog.at_level(logging.WARNING):
        found = served(traced, route, npu_warmup="lazy")
    assert_same(found, served(traced, traced.module))
    assert len(route.captured) == 1 and route.eager_steps["1 sizes are captured already"] > 3
    assert (
        sum(
            "operator by operator instead of as a whole graph: 1 sizes are captured already" in r.getMessage()
            for r in caplog.records
        )
        == 1
    )


def test_without_streams_nothing_is_captured(monkeypatch, caplog):
    traced = ready("llama", "aclgraph")
    route, graph = capturing(monkeypatch, traced, 0)
    assert_same(served(traced, route, max_tokens=1), served(traced, traced.module, max_tokens=1))
    assert graph.calls == 0 and "no size can be captured: 0 are requested" in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
def test_a_capture_that_fails_leaves_the_others(monkeypatch, caplog, kind):
    traced = ready("llama", "aclgraph")
    route, _ = capturing(monkeypatch, traced, 3)
    run, attempts = Replayed.__call__, []

    def scarce(self, *args):
        if len(self.addresses) >= 1 and args[route._ids_at].shape[1] == 4:
            attempts.append(len(self.addresses))
            raise kind("The resources are insufficient")
        return run(self, *args)

    monkeypatch.setattr(Replayed, "__call__", scarce)
    assert_same(served(traced, route, npu_warmup="lazy"), served(traced, traced.module))
    assert "failed to capture a step of 4 tokens" in caplog.text and "resources are insufficient" in caplog.text
    assert route.captured and route.eager_steps and len(attempts) == 1


def test_new_caches_are_captured_anew(monkeypatch):
    traced = ready("llama", "aclgraph")
    route, _ = capturing(monkeypatch, traced, 3)
    served(traced, route, max_tokens=1)
    assert route.captured
    program = link(traced, route)
    program.bind(allocate_kv_cache(program.caches, 4 + program.reserve(2, 8, 32), 16))
    assert not route.captured and not route._graphs and not route._static


def test_graphs_that_gather_blocks_are_not_captured(monkeypatch, caplog):
    traced = ready("gemma2", "aclgraph")
    route, _ = capturing(monkeypatch, traced, 3)
    assert route.plan(4, 32, 100) == 0 and route.size_for(StepSize(1, 1, 1, 1)) is None
    assert "gathers cache blocks" in caplog.text


def test_only_decode_is_captured_where_sequences_are_padded(monkeypatch):
    traced = ready("llama", "aclgraph", block_size=128, head_dim=512)
    route, _ = capturing(monkeypatch, traced, 3)
    assert_same(served(traced, route), served(traced, traced.module))
    assert route.captured and max(route.planned) == LIMITS["max_num_seqs"]
    assert "padded_tokens_2" in traced.step_inputs and any(
        "differ in length" in reason for reason in route.eager_steps
    )


def test_lengths_that_a_replay_would_not_get():
    traced = lowered("llama", "aclgraph")[1].copy()
    lens = traced.placeholder("kv_lens")
    with traced.graph.inserting_before(traced.output):
        traced.graph.call_function(torch.ops.aten.full.default, ([2], lens))
    assert "but a replay updates those of attention calls only" in AclGraphs(traced, traced.module).refusal


# Through torchair


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_ge_graphs_serve_the_same(model_type, caplog):
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

    traced = ready(model_type)
    route = GeGraphs(traced, sequences_per_graph=2)
    made: list[Counter[str]] = []
    optimize = GeConcreteGraph.optimize_graph_without_runtime

    def optimized(self, *args, **kwargs):
        optimize(self, *args, **kwargs)
        made.append(Counter(op.type for op in self.graph.op))

    watched = mock.patch.object(GeConcreteGraph, "optimize_graph_without_runtime", optimized)
    with caplog.at_level(logging.INFO, "torch_pagoda"), watched:
        assert_same(served(traced, route), served(traced, traced.module))
    assert len(made) == 2
    for types in made:
        assert types["ScatterPaKvCache"] == types["FusedInferAttentionScore"] == len(traced.caches)
        assert types["TensorMove"] == types["Assign"] == 0, "caches are copied"
    assert route.planned == (2, 4)
    assert set(route.graphs) == {2, 4}, "one graph for each planned number of sequences, whatever the lengths are"
    compiled = [r.getMessage() for r in caplog.records if "compiling the GE graph" in r.getMessage()]
    assert len(compiled) == 2
    # Another engine plans for others; what is compiled already is used again.
    served(traced, route, max_tokens=1, max_num_seqs=2)
    assert route.planned == (2,) and set(route.graphs) == {2, 4}


@pytest.mark.torchair
def test_gathered_attention_is_one_ge_graph():
    traced = ready("gemma2")
    route = GeGraphs(traced)
    assert_same(served(traced, route, max_tokens=1), served(traced, traced.module, max_tokens=1))
    assert set(route.graphs) == {0}


@pytest.mark.torchair
def test_an_engine_through_torchair():
    from legal_models import build_legal_model

    model = build_legal_model("llama", dtype=torch.bfloat16)
    llm = pagoda.LLM(model, target="npu", codegen="ge", block_size=16, num_blocks=12, max_num_seqs=3)
    assert llm.compile_report.codegen == "ge" and llm.compile_report.verdict.ok
    assert llm.compile_report.verdict.rows > 50 and not llm.compile_report.dropped_passes
    plain = pagoda.LLM(model, target="npu", codegen="none", block_size=16, num_blocks=12, max_num_seqs=3)
    params = pagoda.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[4, 5, 6], list(range(3, 40)), [7]]
    tokens = [[o.outputs[0].token_ids for o in engine.generate(prompts, params)] for engine in (llm, plain)]
    assert tokens[0] == tokens[1]


@pytest.mark.torchair
@pytest.mark.parametrize("fails", ["torchair", "GE"])
def test_a_model_that_no_graph_runs_is_said_to_run_without_one(monkeypatch, fails):
    """torchair has no converter for an operator; or GE refuses at the first step what torchair made."""
    from legal_models import build_legal_model

    def refuse(*_):
        raise RuntimeError("E40021: no such operator\nat line 1")

    monkeypatch.setattr(GeGraphs, "_compile", refuse if fails == "torchair" else lambda *_: refuse)
    llm = pagoda.LLM(build_legal_model("llama"), target="npu", codegen="ge", block_size=16, num_blocks=12)
    report = llm.compile_report
    assert report.codegen == "none"
    assert report.dropped_passes == [("ge", "it fails: E40021: no such operator")]


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "qwen3_moe"])
def test_captured_graphs_serve_the_same(model_type):
    from npugraph_ex._acl_concrete_graph.acl_graph import AclGraph

    traced = ready(model_type, "aclgraph")
    route = AclGraphs(traced, traced.module, budget=3)
    kinds: list[Any] = []
    load = AclGraph.load
    with (
        captured_graphs() as graphs,
        mock.patch.object(AclGraph, "load", lambda *a: (kinds.append(a[1]), load(*a))[1]),
    ):
        assert_same(served(traced, route), served(traced, traced.module))
    assert len(graphs) == len(route.captured) <= 3, "npugraph_ex captured what we meant it to"
    # Weights and caches stay where they are; only a step's own tensors are compared and copied.
    info = kinds[-1]
    weights = sum(node.users != {} for node in traced.placeholders if node.name in traced.constants)
    assert len(info.parameter_user_inputs) == weights
    assert len(info.mutated_user_inputs) == 2 * len(traced.caches)
    assert len(info.user_inputs_mapping) == len(route.changing) + len(info.mutated_user_inputs)
    assert sum(graph.replays for graph in graphs) > len(graphs) and not route.eager_steps
    for graph in graphs:
        names = [str(call.function) for call in graph.calls]
        attention = sum("npu_fused_infer_attention_score" in name for name in names if name.endswith(".out"))
        assert attention == names.count("npu.npu_scatter_pa_kv_cache.default") == len(traced.caches)
        assert not [name for name in names if "_functional" in name or name == "aten.copy_.default"], (
            "caches are copied"
        )


@pytest.mark.torchair
def test_a_second_engine_is_captured_at_its_own_addresses():

    traced = ready("llama", "aclgraph")
    route = AclGraphs(traced, traced.module, budget=3)
    with captured_graphs() as graphs:
        served(traced, route, max_tokens=1)
        first = len(graphs)
        assert_same(served(traced, route, num_blocks=30), served(traced, traced.module, num_blocks=30))
        assert len(graphs) - first == len(route.captured)


@pytest.mark.torchair
def test_sequences_padded_to_the_longest_are_captured_in_decode():

    traced = ready("llama", "aclgraph", block_size=128, head_dim=512)
    route = AclGraphs(traced, traced.module, budget=3)
    with captured_graphs() as graphs:
        assert_same(served(traced, route), served(traced, traced.module))
    assert len(graphs) == len(route.captured) > 0
