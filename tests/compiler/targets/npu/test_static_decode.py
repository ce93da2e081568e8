"""Static graphs of decode steps: sizes, padding, lengths on the device, and what is refused.

Without torchair the graph of fixed sizes runs as it is; the tests marked ``torchair`` run what torchair made of it.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from lowered_models import LIMITS, assert_same, lowered, served
from static_routes import AsItIs

from torch_pagoda.compiler.capture import trace
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.npu.flat_graph import cache_inputs, flat_graph
from torch_pagoda.compiler.targets.npu.ge import static_graph as module
from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.compiler.targets.npu.ge.static_decode import decode_inputs
from torch_pagoda.compiler.targets.npu.ge.static_graph import NotStatic, StaticGraph, static_graph, why_not_static
from torch_pagoda.compiler.targets.npu.sizes.step_padding import StepSize
from torch_pagoda.npu_tools.offline import decode_graphs
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.npu_tools.offline.decode_graphs import (
    GraphCounts,
    counted_decode_graphs,
    static_decode_graph,
)
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.schedule.schedule_super_kernels import schedule_super_kernels
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache

from device_lengths import attention_by_tensors
from legal_models import build_legal_model

SIZES = {"block_size": 16, "num_blocks": 24}


def inputs_of(traced: TracedGraph, sequences: int = 3, width: int = 5) -> dict[str, torch.Tensor]:
    caches = allocate_kv_cache(traced.caches, 24, 16)
    parts = [part.name for spec in traced.caches for part in spec.parts()]
    numbers = [i for i, spec in enumerate(traced.caches) for _ in spec.parts()]
    tensors = [tensor for entry in caches for tensor in entry]
    named = {f"{name}_{i}": tensor for name, i, tensor in zip(parts, numbers, tensors, strict=True)}
    return {**decode_inputs(traced, sequences, width), **named}


def sizes_in(arguments: Any) -> list[Any]:
    found: list[Any] = []
    torch.fx.node.map_aggregate(arguments, found.append)
    return found


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "lfm2", "dots1"])
def test_decode_steps_are_served_the_same(model_type):
    traced = lowered(model_type)[1]
    route = AsItIs(traced, sequences_per_graph=2)
    assert_same(served(traced, route, max_tokens=4), served(traced, traced.module, max_tokens=4))
    assert route.static.planned == (2, 4) and not route.static.dropped
    # The last sequences end one after the other: three are filled up to four, one to two.
    assert set(route.steps) == {2, 4} and len(route.copies) == 2
    for copy in route.copies:
        for node in copy.module.graph.nodes:
            assert not any(
                isinstance(part, torch.SymInt | torch.SymBool) for part in sizes_in((node.args, node.kwargs))
            )
            for part in sizes_in(node.meta.get("example_value")):
                assert not isinstance(part, torch.SymInt)
                assert not isinstance(part, torch.Tensor) or all(type(size) is int for size in part.shape)
    lengths = [n for n in copy.module.graph.nodes if n.name in ("query_ends", "kv_lens")]
    assert len(lengths) == 2 and all(value(n).dtype is torch.int64 and value(n).dim() == 1 for n in lengths)


def test_prompts_and_mixed_steps_have_no_static_graph():
    traced = lowered()[1]
    route = AsItIs(traced, sequences_per_graph=1)
    seen = []
    dynamic = traced.module
    route._compile = lambda length: lambda *args: (seen.append(args), dynamic(*args))[1]
    served(traced, route)
    names = [node.name for node in traced.placeholders]
    lengths = [args[names.index("query_ends")] for args in seen]
    assert lengths and all(ends != list(range(1, len(ends) + 1)) for ends in lengths), "a decode step ran there"


def test_which_steps():
    route = AsItIs(lowered()[1])
    # A block for padding, and six of 16 for the largest step of warm-up, 64 sequences and 24 tokens of chunks.
    assert route.reserve(64, 2048, 4000) == 1 + 6 and route.static.planned == tuple(range(8, 65, 8))
    assert route.static.width == 250
    assert route.size_for(StepSize(5, 5, 5, 9)) == StepSize(8, 8, 8, 250)
    assert route.size_for(StepSize(8, 8, 1, 250)) == StepSize(8, 8, 8, 250)
    for other in (StepSize(6, 5, 5, 9), StepSize(5, 5, 0, 9), StepSize(5, 5, 5, 251)):
        assert route.static.size_for(other) is None
    assert route.static.size_for(StepSize(65, 65, 65, 1)) is None
    assert len(AsItIs(lowered()[1]).static.planned) == 0
    route.reserve(1000, 2048, 4000)
    assert len(route.static.planned) == 8 and route.static.planned[-1] == 1000
    route.static.drop(125, "it differs")
    assert route.static.size_for(StepSize(120, 120, 120, 9)) is None, "the next would need more padding than there is"
    assert route.size_for(StepSize(120, 120, 120, 9)) == StepSize(125, 125, 120, 9), "with sizes that vary"
    gemma = AsItIs(lowered("gemma2")[1])
    gemma.reserve(64, 2048, 4000)
    assert gemma.static.planned == () and gemma.size_for(StepSize(8, 8, 8, 3)) is None


def test_graphs_are_of_the_caches_as_bound():
    traced = lowered()[1]
    route = AsItIs(traced)
    for blocks in (9, 11):
        route.reserve(4, 19, 64)
        route.bind(allocate_kv_cache(traced.caches, blocks, 16))
        assert not route.static.graphs
        route.static.graph(4)
        names = [node.name for node in route.copies[-1].module.graph.nodes]
        assert route.copies[-1].values[names.index("key_cache_0")].shape[0] == blocks
    fixed = {names[i] for i in route.copies[-1].fixed}
    assert {"key_cache_0", "value_cache_1", "npu_causal_mask"} <= fixed
    assert not fixed & {traced.input_ids, "query_ends", "kv_lens", "block_table", "slot_mapping"}
    blocks = value(traced.placeholder("key_cache_0")).shape[0]
    assert isinstance(blocks, torch.SymInt) and blocks.node.expr.is_Symbol, "the graph is left alone"


@pytest.mark.parametrize("way", ["full", "lazy"])
@pytest.mark.parametrize("fails", ["compile", "first step"])
def test_a_graph_that_does_not_compile_is_left_out_by_name(caplog, way, fails):
    """GE compiles what torchair converted when it first runs."""
    traced = lowered()[1]
    route = AsItIs(traced, sequences_per_graph=2)
    make, attempts = route._compile_static, []

    def no_room(*_):
        attempts.append(4)
        raise RuntimeError("no room on the device\nand more")

    def scarce(inputs):
        if inputs[traced.input_ids].shape[1] != 4:
            return make(inputs)
        return no_room if fails == "first step" else no_room()

    route.static._compile = scarce
    with caplog.at_level(logging.WARNING):
        assert_same(served(traced, route, npu_warmup=way), served(traced, traced.module))
    assert set(route.static.graphs) <= {2} == set(route.steps) and attempts == [4]
    said = {
        "full": "decode steps of 4 sequences do not run as a whole graph: it fails: no room on the device",
        "lazy": "not using the static decode graph for 4 sequences: it fails: no room on the device",
    }[way]
    assert route.static.dropped == {4: "it fails: no room on the device"}
    assert [record.getMessage() for record in caplog.records if "no room" in record.getMessage()] == [said]


def test_errors_of_a_graph_that_has_run_are_raised():
    route = AsItIs(lowered()[1])
    route.static.planned = (2,)
    outcomes = iter([[torch.ones(1)], RuntimeError("the device is lost")])

    def run(*_):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    route.static.graphs[2] = run
    assert route.static.run(2, ()) is not None
    with pytest.raises(RuntimeError, match="the device is lost"):
        route.static.run(2, ())


# What has no static graph


@pytest.mark.parametrize(("model_type", "options"), [("gemma2", {}), ("bloom", {})])
def test_graphs_that_gather_blocks_are_refused(model_type, options, caplog):
    traced = lowered(model_type)[1]
    assert "gathers cache blocks" in why_not_static(traced)
    with caplog.at_level(logging.WARNING):
        GeGraphs(traced, static_decode=True)
    assert "decode steps have no static graphs: the graph gathers" in caplog.text


def test_schedules_of_graphs_that_gather_blocks_are_left_out():
    traced = lowered("gemma2")[1].copy()
    assert schedule_super_kernels(traced)[1]
    reason = f"decode steps have no static graphs: {why_not_static(traced)}"
    assert GeGraphs(traced, static_decode=True).dropped_schedules == {"super_kernels": reason}
    assert not GeGraphs(lowered("gemma2")[1], static_decode=True).dropped_schedules


def test_lengths_that_something_else_reads_are_refused():
    traced = lowered()[1].copy()
    with traced.graph.inserting_before(traced.output):
        made = traced.graph.call_function(torch.ops.aten.full.default, (traced.placeholder("kv_lens"), 1))
    assert f"{made.name} (aten.full.default) takes lengths from the host" == why_not_static(traced)
    with pytest.raises(NotStatic, match="takes lengths from the host"):
        static_graph(traced, inputs_of(traced), attention_by_tensors())


def test_calls_that_are_not_paged_are_refused():
    traced = lowered()[1].copy()
    traced.paged = False
    assert "not paged" in why_not_static(traced)


def test_sizes_that_contradict_each_other():
    traced = lowered()[1]
    for name, tensor, words in (
        ("slot_mapping", torch.zeros(4), "has 4 in dim 0, where the graph has 3|has 3 in dim"),
        ("key_cache_0", torch.zeros(24, 32, 2, 128), "key_cache_0 has 32 in dim 1, where the graph has 16"),
    ):
        with pytest.raises(NotStatic, match=words):
            static_graph(traced, {**inputs_of(traced), name: tensor}, attention_by_tensors())
    given = inputs_of(traced)
    del given["block_table"]
    with pytest.raises(NotStatic, match=r"block_table .*no input determines"):
        static_graph(traced, given, attention_by_tensors())


# Mistakes that have to be found


def test_mutant_a_symbol_keeps_its_hint(monkeypatch):
    monkeypatch.setattr(module._Sizes, "number", lambda self, size: int(size.node.hint) if _is_symbol(size) else size)
    traced = lowered()[1]
    with pytest.raises(NotStatic):
        static_graph(traced, inputs_of(traced), attention_by_tensors())


def test_mutant_one_argument_keeps_its_hint():
    """The size of a constant that is added to every row: the recorded size shows it, no operator fails."""
    traced = lowered()[1].copy()
    ids = traced.placeholder(traced.input_ids)
    (embedding,) = [user for user in ids.users if "embedding" in str(user.target)]
    with traced.before(next(iter(embedding.users))):
        ones = traced.call(torch.ops.aten.ones.default, [value(ids).shape[1]], dtype=torch.float32)
    static_graph(traced, inputs_of(traced), attention_by_tensors())
    ones.args = ([int(value(ids).shape[1].node.hint)],)
    with pytest.raises(NotStatic, match=rf"{ones.name} .*returns torch.float32 \(40,\), but torch.float32 \(3,\)"):
        static_graph(traced, inputs_of(traced), attention_by_tensors())


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def test_mutant_dummies_write_into_blocks_of_requests(monkeypatch):
    bind = AsItIs.bind

    def bound(self, kv_cache):
        bind(self, kv_cache)
        self._first_spare_block = 0

    monkeypatch.setattr(AsItIs, "bind", bound)
    traced = lowered()[1]
    route = AsItIs(traced, sequences_per_graph=4)
    with pytest.raises(AssertionError):
        assert_same(served(traced, route, max_tokens=6), served(traced, traced.module, max_tokens=6))
    assert set(route.steps) == {LIMITS["max_num_seqs"]}


@pytest.mark.parametrize("fault", ["swapped", "shifted", "constant"])
def test_mutant_lengths_are_wired_wrongly(monkeypatch, fault):
    flatten = StaticGraph.flatten

    def wrong(self, inputs):
        inputs = list(inputs)
        ends, lens = self.lists
        if fault == "swapped":
            inputs[ends], inputs[lens] = inputs[lens], inputs[ends]
        elif fault == "shifted":
            inputs[lens] = [n - 1 or 1 for n in inputs[lens]]
        else:
            inputs[lens] = [17] * len(inputs[lens])
        return flatten(self, inputs)

    monkeypatch.setattr(StaticGraph, "flatten", wrong)
    traced = lowered()[1]
    route = AsItIs(traced, sequences_per_graph=4)
    with pytest.raises(AssertionError):
        assert_same(served(traced, route), served(traced, traced.module))
        assert not route.static.dropped, route.static.dropped


# Through torchair


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "qwen3_moe", "deepseek_v3", "lfm2", "mamba2"])
def test_torchair_serves_the_same(model_type):
    traced = lowered(model_type)[1]
    route = GeGraphs(traced, sequences_per_graph=4, static_decode=True)
    assert_same(served(traced, route), served(traced, traced.module))
    assert set(route.static.graphs) == {4} and not route.static.dropped


@cache
def lowered_in_half(model_type: str) -> TracedGraph:
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    options = CompileOptions(codegen="none", target="npu", verify="off")
    return run_pipeline(trace.capture(model), options, None, CompileReport(model_type))


@pytest.mark.torchair
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt_oss", "qwen3_moe", "deepseek_v3", "lfm2", "dots1", "qwen3_5_text"]
)
def test_ge_graphs_of_fixed_sizes(model_type):
    traced = lowered_in_half(model_type)
    varying, fixed = counted_decode_graphs(traced)
    assert varying.host_nodes and varying.unknown_sizes
    assert fixed.host_nodes == fixed.host_inputs == fixed.unknown_sizes == fixed.cache_copies == 0
    # Chunks of one token, and a tensor that is filled with a number of the graph, need less.
    fewer = model_type in ("dots1", "qwen3_5_text")
    assert fixed.launches < varying.launches if fewer else fixed.launches == varying.launches
    graph = static_decode_graph(traced, sequences=4)
    attention = graph.of_type("FusedInferAttentionScore")
    assert attention
    for node in attention:
        assert node.inputs["actual_seq_lengths"] == "query_ends:0"
        assert node.inputs["actual_seq_lengths_kv"] == "kv_lens:0"
    for name in ("query_ends", "kv_lens"):
        assert graph[name].attributes["shape"] == [4] and graph[name].attributes["dtype"] == "int64"


@pytest.mark.torchair
def test_mutant_a_launch_more(monkeypatch):
    def with_more(*args):
        copy = static_graph(*args)
        linear = next(node for node in copy.module.graph.nodes if "npu_linear" in str(node.target))
        with copy.module.graph.inserting_after(linear):
            more = copy.module.graph.call_function(torch.ops.aten.neg.default, (linear,))
        linear.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
        copy.module.recompile()
        return copy

    monkeypatch.setattr(decode_graphs, "static_graph", with_more)
    varying, fixed = counted_decode_graphs(lowered_in_half("llama"))
    assert fixed.launches == varying.launches + 1


@pytest.mark.torchair
def test_mutant_lists_stay_lists():
    """Attention with lists leaves integers on the host, which the counts show."""
    traced = lowered_in_half("llama")
    flat = flat_graph(traced, 4)
    counts = GraphCounts.of(convert(flat.module, flat.values), cache_inputs(traced))
    assert counts.host_inputs and counts.unknown_sizes


@pytest.mark.torchair
def test_options_of_torchair():
    from torch_pagoda.compiler.targets.npu.ge.ge_route import ge_config

    for static in (False, True):
        options = ge_config(static=static).as_dict()
        told = {key: text for part in options for key, text in part.items()}
        assert told["frozen_parameter"] in ("1", True)
        assert told.get("ge.tiling_schedule_optimize", "0") == str(int(static))
        assert told["ge.topoSortingMode"] == ("3" if static else "1")


@pytest.mark.torchair
def test_an_engine_through_torchair_with_static_decode(caplog):
    import torch_pagoda as pagoda

    model = build_legal_model("llama", dtype=torch.bfloat16)
    params = pagoda.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts, tokens = [[4, 5, 6], list(range(3, 40)), [7]], []
    for options in ({"codegen": "ge", "static_decode": True}, {"codegen": "none"}):
        with caplog.at_level(logging.INFO, "torch_pagoda"):
            llm = pagoda.LLM(model, target="npu", **SIZES, max_num_seqs=3, **options)
            tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert tokens[0] == tokens[1]
    assert "compiling the static decode graph for 3 sequences" in caplog.text and "not used" not in caplog.text
