"""Int8 caches served by two graphs, one with the attention kernel for decode steps: which step goes where, numbers,
graphs of the toolchain.

Tests marked ``torchair`` go through the real torchair and npugraph_ex.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from lowered_models import LIMITS, assert_same, served
from npu_calls import illegal_calls, npu_calls

from torch_pagoda.compiler import CompileOptions, build
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.cpu.kernels import call_kernels
from torch_pagoda.compiler.targets.npu import route as route_module
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.decode_steps import DecodeCalls, DecodeRoute, StepKinds, is_decode_step
from torch_pagoda.compiler.targets.npu.flat_graph import cache_inputs
from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.compiler.targets.npu.ge.static_graph import static_graph, why_not_static
from torch_pagoda.compiler.targets.npu.route import Route
from torch_pagoda.compiler.targets.npu.routes import make_route
from torch_pagoda.compiler.targets.npu.warm_up.warm_up import warm_up
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.npu_tools.offline.decode_graphs import GraphCounts, counted_decode_graphs
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.passes.lower.npu.attention import decode_attention
from torch_pagoda.passes.lower.npu.attention.decode_attention import decode_graph
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.requests.outputs import RequestOutput

from device_lengths import attention_by_tensors
from legal_models import build_legal_model
from shared_graphs import capture

ROUNDED = 0.01
"""Of log-probabilities: nearly all differ by 1e-6, but a key next to the middle between two integers may be rounded
the other way."""
KERNEL = torch.ops.npu.npu_fused_infer_attention_score.default


def rewritten(model: Any, target: str = "npu", graph_mode: str = "ge", block_size: int = 32) -> TracedGraph:
    captured = capture(model)
    captured.traced.npu = NpuTarget(block_size=block_size, graph_mode=graph_mode, float32_as=torch.bfloat16)
    options = CompileOptions(codegen="none", target=target, verify="off", kv_cache_dtype="int8")
    return run_pipeline(captured, options, None, CompileReport(""))


KINDS = {
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [],
    },
}


def model_of(model_type: str) -> Any:
    """A model with one layer of each kind, where it has two kinds."""
    kinds: dict[str, Any] = {"num_hidden_layers": 2, **KINDS[model_type]} if model_type in KINDS else {}
    return build_legal_model(model_type, **kinds)


@cache
def _both(model_type: str, graph_mode: str, block_size: int) -> tuple[TracedGraph, TracedGraph]:
    traced = rewritten(model_of(model_type), graph_mode=graph_mode, block_size=block_size)
    decode = decode_graph(traced)
    assert decode is not None
    return traced, decode


def both(model_type: str = "llama", graph_mode: str = "ge", block_size: int = 32) -> tuple[TracedGraph, TracedGraph]:
    """The graph for all steps, and that for decode steps; copies of what is made once per process."""
    traced, decode = _both(model_type, graph_mode, block_size)
    return traced.copy(), decode.copy()


@cache
def by_formula(model_type: str = "llama", graph_mode: str = "ge", block_size: int = 32) -> list[RequestOutput]:
    """What is served where all steps run by the first of ``both``."""
    traced, _ = both(model_type, graph_mode, block_size)
    return served(traced, traced.module, max_tokens=4)


def calls_of(traced: TracedGraph, decode: TracedGraph) -> DecodeCalls:
    """The calls of both, one by one."""
    return DecodeCalls(traced, decode, decode.module, traced.module)


class Watched:
    """A graph that notes how many tokens each sequence of its steps had."""

    def __init__(self, traced: TracedGraph) -> None:
        self.lens_at = [node.name for node in traced.placeholders].index("query_lens")
        self.module = traced.module
        self.steps: list[list[int]] = []

    def __call__(self, *args: Any) -> Sequence[Any]:
        self.steps.append(list(args[self.lens_at]))
        return self.module(*args)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("lens", "tokens", "decode"),
    [
        ([1, 1, 1], 3, True),
        ([1], 1, True),
        ([1, 1, 0, 0], 2, True),  # filled up with sequences that have no token
        ([2, 1], 3, False),
        ([1, 2, 0], 3, False),  # as many sequences as tokens
        ([0, 1, 1], 2, False),
        ([2, 0], 2, False),
        ([3], 3, False),
    ],
)
def test_steps_of_one_token_per_sequence_are_told_from_others(lens, tokens, decode):
    assert is_decode_step(lens, tokens) is decode


@pytest.mark.parametrize(
    ("model_type", "block_size"),
    [
        *[("llama", 32), ("qwen3", 128)],
        *[("mistral", 32), ("gemma3_text", 32), ("cohere2", 32)],  # windows, of all layers or of some
    ],
)
def test_decode_steps_say_what_the_formula_does(model_type, block_size):
    traced, decode = both(model_type, block_size=block_size)
    assert illegal_calls(decode, decode.npu) == illegal_calls(traced, traced.npu) == []
    one, others = Watched(decode), Watched(traced)
    found = served(traced, DecodeCalls(traced, decode, one, others), max_tokens=4)
    assert_same(found, by_formula(model_type, block_size=block_size), tolerance=ROUNDED)
    assert len(one.steps) > 3 and all(set(lens) == {1} for lens in one.steps)
    assert len(others.steps) > 3 and all(max(lens) > 1 for lens in others.steps)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gemma3_text"])
def test_served_tokens_are_those_of_the_cpu(model_type):
    canonical = rewritten(model_of(model_type), "cpu")
    found = served(canonical, call_kernels(canonical), max_tokens=4)
    assert_same(found, by_formula(model_type), tolerance=0.05)


def test_both_graphs_have_the_same_inputs_and_write_alike():
    traced, decode = both()
    names = [node.name for node in traced.placeholders]
    assert [node.name for node in decode.placeholders] == names and {"kv_lens", "query_lens"} <= set(names)
    kernels = [node for node, _ in npu_calls(decode, decode.npu) if node.target is KERNEL]
    assert len(kernels) == len(traced.caches) and not [n for n in traced.graph.nodes if n.target is KERNEL]
    for graph in (traced, decode):
        for index, spec in enumerate(graph.caches):
            assert spec.scales_by_head
            for part in spec.parts():
                node = graph.placeholder(f"{part.name}_{index}")
                writers = [user for user in node.users if user.target._schema.is_mutable]
                assert len(writers) == 1 and min(node.users) is writers[0]
                if graph is decode:  # what reads it is the kernel, at most through another shape
                    readers = [user for user in node.users if user is not writers[0]]
                    views = [user for user in readers if user.target is torch.ops.aten.reshape.default]
                    assert {r.target for r in readers if r not in views} <= {KERNEL} and len(readers) == 1
                    assert all(set(u.target for u in view.users) == {KERNEL} for view in views)
    assert not any(str(node.target).startswith(("aten.index", "aten.transpose")) for node in _of_caches(decode))


def _of_caches(traced: TracedGraph) -> list[torch.fx.Node]:
    return [user for name in cache_inputs(traced) for user in traced.placeholder(name).users]


def test_codegen_none_serves_decode_steps_by_the_kernel(caplog, monkeypatch):
    model = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    options = CompileOptions(codegen="none", target="npu", kv_cache_dtype="int8", block_size=32)
    program = build_program(model, options)
    assert isinstance(program._run, DecodeCalls) and program.report.verdict.ok and not program.report.dropped_passes
    right = decode_attention._arguments
    monkeypatch.setattr(
        decode_attention,
        "_arguments",
        lambda plan, target, key, val, *rest: right(plan, target, val, key, *rest),
    )
    with caplog.at_level(logging.WARNING, build.__name__):
        program = build_program(model, options)
    assert not isinstance(program._run, DecodeCalls) and program.report.verdict.ok
    assert [name for name, _ in program.report.dropped_passes] == ["decode_attention"]
    assert "decode steps run by the formula" in caplog.text


def test_caches_whose_scales_lie_otherwise_are_refused():
    traced, _ = both()
    program = link(traced, traced.module)
    specs = [replace(spec, scales_by_head=False) for spec in traced.caches]
    with pytest.raises(ValueError, match=r"key_scale is \(4, 32, 2\).*give \[num_blocks, 2, block_size\]"):
        program.bind(allocate_kv_cache(specs, 4, 32))
    with pytest.raises(ValueError, match="key_cache has blocks of 16 tokens"):
        program.bind(allocate_kv_cache(traced.caches, 4, 16))
    program.bind(allocate_kv_cache(traced.caches, 4, 32))


class AsItIs(GeGraphs):
    """The route without torchair: graphs run as they are, those of fixed sizes with lengths as tensors."""

    def __init__(self, traced: TracedGraph, **options: Any) -> None:
        super().__init__(traced, **options)
        self.steps: list[list[int]] = []
        self.lens_at = [node.name for node in traced.placeholders].index("query_lens")

    def _note(self, run: Any) -> Any:
        return lambda *args: (self.steps.append(list(args[self.lens_at])), run(*args))[1]

    def _compile(self, length: int) -> Any:
        return self._note(self.traced.module)

    def _compile_static(self, inputs: Any) -> Any:
        copy = static_graph(self.traced, inputs, attention_by_tensors())
        return self._note(lambda *args: copy.module(*copy.flatten(args)))


@pytest.mark.parametrize("static", [False, True])
def test_graphs_of_both_kinds_are_planned_compared_and_used(static):
    traced, decode = both("gemma3_text")
    first = AsItIs(decode, sequences_per_graph=2, static_decode=static, eager=traced.module)
    route = DecodeRoute(first, AsItIs(traced, sequences_per_graph=2))
    assert why_not_static(decode) == "" and "gathers the blocks" in why_not_static(traced)
    program = link(traced, route)
    spare = program.reserve(4, 19, 200)
    program.bind(allocate_kv_cache(traced.caches, 24 + spare, 32))
    assert first.owned_blocks == route.others.owned_blocks == route.owned_blocks == 24
    sizes = warm_up(program, route)
    assert [size.reason for size in sizes] == [""] * len(sizes) and first.is_warm and route.others.is_warm
    assert all(set(lens) == {1} for lens in first.steps) and {len(lens) for lens in first.steps} == {2, 4}
    assert all(max(lens) > 1 for lens in route.others.steps)
    assert_same(served(traced, route, max_tokens=4), by_formula("gemma3_text"), tolerance=ROUNDED)
    assert not route.eager_steps


class WithoutFixedSizes(AsItIs):
    """One whose toolchain fails on them."""

    def _compile_static(self, inputs: Any) -> Any:
        raise RuntimeError("no room")


def test_the_graph_for_any_step_is_there_where_fixed_sizes_fail():
    traced, decode = both()
    first = WithoutFixedSizes(decode, sequences_per_graph=4, static_decode=True, eager=pytest.fail)
    route = DecodeRoute(first, AsItIs(traced, sequences_per_graph=4))
    program = link(traced, route)
    program.bind(allocate_kv_cache(traced.caches, 24 + program.reserve(4, 19, 200), 32))
    reasons = {size.name: size.reason for size in warm_up(program, route)}
    assert reasons.pop("decode steps of 4 sequences") and set(reasons.values()) == {""}
    assert_same(served(traced, route, max_tokens=4), by_formula(), tolerance=ROUNDED)
    assert first.steps and not route.eager_steps


@pytest.mark.parametrize("tokens", [4, 19])
def test_each_graph_is_compared_twice_by_steps_that_it_is_for(tokens):
    """Also where no step has more tokens than sequences."""
    traced, decode = both()
    route = DecodeRoute(AsItIs(decode, eager=pytest.fail), AsItIs(traced))
    route.reserve(4, tokens, 200)
    for part in (route.decode, route.others):
        sizes = [size for size in route.planned_sizes() if size.compile.func.__self__ is part]
        assert sizes and all(len(size.shapes) == 2 for size in sizes)
        assert all((s.tokens == s.sequences) == (part is route.decode) for size in sizes for s in size.shapes)


def test_a_step_that_falls_back_finds_all_that_the_formula_reads_on_the_device(monkeypatch):
    traced, decode = both()
    on_device: dict[int, torch.Tensor] = {}

    def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = tensor.clone()
        on_device[id(copy)] = copy
        return copy

    def formula(*args: Any) -> Any:
        assert all(id(args[i]) in on_device for i in Route(traced).changing), "left on the host"
        return traced.module(*args)

    monkeypatch.setattr(route_module, "sent", sent)
    monkeypatch.setattr(Route, "__abstractmethods__", frozenset())
    monkeypatch.setattr(GeGraphs, "_compile", lambda self, length: [][0])
    route = make_route("ge", traced, formula, decode=DecodeCalls(traced, decode, pytest.fail, formula))
    program = link(traced, route)
    program.bind(allocate_kv_cache(traced.caches, 24 + program.reserve(4, 19, 200), 32))
    assert all(size.reason for size in warm_up(program, route))
    assert_same(served(traced, route, max_tokens=4), by_formula(), tolerance=ROUNDED)
    assert route.eager_steps


def test_calls_of_the_kernel_serve_where_nothing_can_be_captured():
    """A layer with chunks gathers in decode steps, too."""
    traced, decode = both("llama4_text", graph_mode="aclgraph")
    calls = calls_of(traced, decode)
    route = make_route("aclgraph", traced, pytest.fail, decode=calls)
    assert isinstance(route, DecodeRoute) and route.decode.refusal and route.decode.eager is calls.decode


def _swapped(call: dict[str, Any]) -> dict[str, Any]:
    return {
        **call,
        "key_antiquant_scale": call["value_antiquant_scale"],
        "value_antiquant_scale": call["key_antiquant_scale"],
    }


def test_a_wrong_decode_graph_is_dropped_when_it_is_compared(caplog):
    traced, decode = both()
    for node in decode.graph.nodes:
        if node.target is KERNEL:
            node.kwargs = _swapped(node.kwargs)
    decode.recompile()
    first = AsItIs(decode, sequences_per_graph=4, eager=traced.module)
    route = DecodeRoute(first, AsItIs(traced, sequences_per_graph=4))
    program = link(traced, route)
    program.bind(allocate_kv_cache(traced.caches, 24 + program.reserve(4, 19, 200), 32))
    with caplog.at_level(logging.WARNING):
        checks = {check.name: check.reason for check in warm_up(program, route)}
    assert "differ from the operators'" in checks["steps of 4 sequences"]
    assert checks["steps of any number of sequences"] == ""
    assert_same(served(traced, route, max_tokens=4), by_formula(), tolerance=ROUNDED)


def test_a_prompt_in_the_decode_graph_is_found(monkeypatch):
    """The mutant that takes every step for a decode step."""
    traced, decode = both()
    monkeypatch.setattr(StepKinds, "is_decode", lambda self, args: True)
    outputs = served(traced, DecodeCalls(traced, decode, decode.module, traced.module))
    assert any(output.outputs[0].error is not None for output in outputs)


def test_captured_sizes_have_sequences_without_tokens(monkeypatch):
    traced, decode = both("gemma3_text", graph_mode="aclgraph")
    monkeypatch.setattr(AclGraphs, "_compile", lambda self, scheduled: self.traced.module)
    route = make_route("aclgraph", traced, traced.module, decode=calls_of(traced, decode))
    assert isinstance(route, DecodeRoute) and isinstance(route.decode, AclGraphs)
    expected = by_formula("gemma3_text", graph_mode="aclgraph")
    assert_same(served(traced, route, max_tokens=4), expected, tolerance=ROUNDED)
    assert {tokens for tokens, _ in route.decode.captured} == {1, 2, 3, 4} and not route.others.captured
    assert route.decode.planned[-1] == LIMITS["max_num_seqs"]
    assert set(route.eager_steps) == {route.others.refusal} and "gathers the blocks" in route.others.refusal
    assert any(limit.startswith("other steps: the graph gathers") for limit in route.limits)


def test_call_by_call_is_no_route():
    traced, decode = both()
    assert make_route("none", traced, traced.module, decode=calls_of(traced, decode)) is None
    calls = calls_of(traced, decode)
    assert isinstance(make_route("ge", traced, traced.module, static_decode=True, decode=calls), Route)


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_torchair_converts_both_kinds_of_decode_graphs(model_type):
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    traced = rewritten(model)
    decode = decode_graph(traced)
    assert decode is not None
    caches = cache_inputs(decode)
    graph = convert(decode.module, [value(n) for n in decode.placeholders], soc="Ascend910B3")
    assert set(caches) <= set(graph.inputs) and graph.cache_copies(*caches) == []
    kernels = [node for node in graph if node.type == "FusedInferAttentionScore"]
    assert len(kernels) == len(decode.caches)
    for index, node in enumerate(kernels):
        assert node.attributes["key_antiquant_mode"] == node.attributes["value_antiquant_mode"] == 5
        assert node.attributes["input_layout"] == "BSH"
        for part in ("key", "value"):  # behind the step's own write, which an edge has to say
            written = graph.source(node, f"{part}_antiquant_scale")
            assert written.in_place and f"{part}_scale_{index}:0" in written.inputs.values()
        window = decode.caches[index].sliding_window
        lens = f"window_lens_32_{window}" if window else "kv_lens"
        assert node.inputs["actual_seq_lengths_kv"].startswith(lens)
        assert bool(node.inputs.get("atten_mask")) == bool(window) != (node.inputs["block_table"] == "block_table:0")
    for name in caches:
        writers = [n for n in graph if name + ":0" in n.inputs.values() and n.in_place]
        assert len(writers) == 1 and not writers[0].is_view
    varying, fixed = counted_decode_graphs(decode)
    assert varying.cache_copies == fixed.cache_copies == 0 and fixed.launches <= varying.launches
    assert fixed.host_nodes == fixed.host_inputs == fixed.unknown_sizes == 0
    gathered = GraphCounts.of(convert(traced.module, [value(n) for n in traced.placeholders]), caches)
    assert gathered.cache_copies == 0 and varying.launches < gathered.launches


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("static", [False, True])
def test_ge_graphs_serve_the_same(static, model_type):
    traced, decode = both(model_type)
    route = make_route("ge", traced, traced.module, static_decode=static, decode=calls_of(traced, decode))
    assert isinstance(route, DecodeRoute)
    assert_same(served(traced, route, max_tokens=4), by_formula(model_type), tolerance=ROUNDED)
    assert route.others.graphs.keys() == {0} and not route.eager_steps
    assert route.decode.static.graphs if static else route.decode.graphs


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_captures_of_decode_steps_serve_the_same(model_type):
    from captured_graphs import captured_graphs

    traced, decode = both(model_type, graph_mode="aclgraph")
    route = make_route("aclgraph", traced, traced.module, decode=calls_of(traced, decode))
    assert isinstance(route, DecodeRoute)
    with captured_graphs() as graphs:
        assert_same(
            served(traced, route, max_tokens=5), served(traced, traced.module, max_tokens=5), tolerance=ROUNDED
        )
    assert graphs and {tokens for tokens, _ in route.decode.captured} <= {1, 2, 3, 4}
    for graph in graphs:
        kernels = [call for call in graph.calls if call.updated is not None]
        assert len(kernels) == len(traced.caches)


def test_schedules_that_a_part_has_left_out_stay_in_the_report():
    traced, decode = both()
    parts = AsItIs(decode, eager=pytest.fail), AsItIs(traced)
    parts[0].dropped_schedules["super_kernels"] = "decode steps have no static graphs"
    route = DecodeRoute(*parts)
    assert route.dropped_schedules == {"super_kernels": "decode steps have no static graphs"}
    assert all(part.dropped_schedules is route.dropped_schedules for part in parts)
