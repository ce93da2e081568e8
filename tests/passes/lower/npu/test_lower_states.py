"""Operators with state for Ascend: what each becomes, why not, and the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from state_graphs import StateGraph, step_of

from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.passes.lower.npu import decode_states, states
from torch_pagoda.passes.lower.npu.decode_graph import decode_graph
from torch_pagoda.passes.lower.npu.states import lower_npu_states
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.state.causal_conv1d import causal_conv1d
from torch_pagoda.runtime.ops.state.linear_recurrence import linear_recurrence
from torch_pagoda.runtime.ops.state.selective_scan import selective_scan
from torch_pagoda.runtime.program import StateSpec
from torch_pagoda.runtime.state_tables import CHUNK_TABLES

from npu_graphs import assert_legal, operators, refusals

COUNTS = [3, 1, 70, 2]
TOKENS = sum(COUNTS)


def convolution(taps: int = 4, activation: str = "silu", target: NpuTarget | None = None) -> StateGraph:
    torch.manual_seed(0)
    given = [torch.randn(1, TOKENS, 16), torch.randn(16, taps), torch.randn(16), activation]
    return StateGraph(causal_conv1d, given, StateSpec("conv_state", (taps - 1, 16), torch.float32), target)


def recurrence(kind: str, delta: bool, target: NpuTarget | None = None, dim: int = 16) -> StateGraph:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, TOKENS, 2, dim)
    value, beta = torch.randn(1, TOKENS, 4, 8), torch.rand(1, TOKENS, 4)
    shape = {"head": (1, TOKENS, 4), "channel": (1, TOKENS, 4, dim), "constant": (4,)}[kind]
    given = [query, key, value, -torch.rand(shape), beta if delta else None, 0.25, 1e-6]
    return StateGraph(linear_recurrence, given, StateSpec("recurrent_state", (4, 8, dim), torch.float32), target)


def scan(target: NpuTarget | None = None) -> StateGraph:
    torch.manual_seed(0)
    x, dt = torch.randn(2, 1, TOKENS, 16)
    writes, reads = torch.randn(2, 1, TOKENS, 5)
    given = [x, dt.exp(), -torch.rand(16, 5), writes, reads, True]
    return StateGraph(selective_scan, given, StateSpec("recurrent_state", (16, 5), torch.float32), target)


def same_numbers(graph: StateGraph) -> None:
    """Lower the graph, and compare a step before and after: results, and every slot that may be read."""
    spec = graph.traced.caches[0]
    where = step_of(COUNTS, spec.shape, spec.dtype)
    expected_state, state = where[0].clone(), where[0].clone()
    expected = graph.run(expected_state, *where[1:])
    assert lower_npu_states(graph.traced).matches == 1
    found = graph.run(state, *where[1:])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert_legal(graph.traced)
    assert not [name for name in operators(graph.traced) if name.startswith("pagoda.")]
    assert operators(graph.traced).count("npu.npu_scatter_nd_update_") == 1, "a second write would copy the pool"
    assert lower_npu_states(graph.traced).matches == 0


@pytest.mark.parametrize("graph_mode", ["ge", "aclgraph"])
def test_a_convolution(graph_mode: str) -> None:
    same_numbers(convolution(target=NpuTarget(graph_mode=graph_mode, float32_as=torch.bfloat16)))


@pytest.mark.parametrize("kind", ["head", "channel", "constant"])
@pytest.mark.parametrize("delta", [True, False])
def test_a_recurrence(kind: str, delta: bool) -> None:
    same_numbers(recurrence(kind, delta))


def test_a_scan() -> None:
    same_numbers(scan())


CAPTURED = NpuTarget(graph_mode="aclgraph", float32_as=torch.bfloat16)


def test_a_delta_rule_where_calls_are_captured() -> None:
    graph = recurrence("head", True, CAPTURED)
    same_numbers(graph)
    assert operators(graph.traced).count("npu.npu_chunk_gated_delta_rule") == 1
    (call,) = [n for n in graph.traced.graph.nodes if "chunk_gated" in str(n.target)]
    assert call.kwargs["scale"] == 0.25, "None would be 1"
    assert not set(graph.traced.step_inputs) & {f"{name}_64" for name in CHUNK_TABLES}


@pytest.mark.parametrize(
    ("kind", "delta", "graph_mode"),
    [
        ("head", True, "ge"),
        ("head", True, "aclgraph"),
        ("channel", True, "ge"),
        ("channel", False, "aclgraph"),
        ("constant", False, "ge"),
        ("scan", False, "aclgraph"),
    ],
)
def test_a_step_of_one_token_per_sequence(kind: str, delta: bool, graph_mode: str) -> None:
    """Many steps, each from slots that the one before wrote, or from snapshots that stay."""
    target = NpuTarget(graph_mode=graph_mode, float32_as=torch.bfloat16)
    graph = scan(target) if kind == "scan" else recurrence(kind, delta, target)
    lower_npu_states(graph.traced)
    other = StateGraph.__new__(StateGraph)
    decoded = decode_graph(graph.traced)
    assert decoded is not None
    assert not [node for node in decoded.placeholders if node.users and node.name.startswith(CHUNK_TABLES)]
    other.traced, other.given = decoded, graph.given
    assert_legal(decoded)
    assert operators(decoded).count("npu.npu_scatter_nd_update_") == 1
    fused = kind == "head" and graph_mode == "aclgraph"
    assert operators(decoded).count("npu.npu_recurrent_gated_delta_rule") == fused
    assert "npu.npu_chunk_gated_delta_rule" not in operators(decoded), "it is for prompts"
    assert len(operators(decoded)) <= (8 if fused else 14)
    spec = graph.traced.caches[0]
    state = torch.randn(2 * TOKENS + 1, *spec.shape)
    expected_state = state.clone()
    starts, every = torch.arange(TOKENS + 1).int(), torch.arange(TOKENS).int()
    for read, write in ((every, every), (every, every + TOKENS), (every + TOKENS, every)):
        expected = graph.run(expected_state, starts, read, write)
        torch.testing.assert_close(other.run(state, starts, read, write), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-5)


def test_operators_that_the_device_computes_wrongly_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"npu_chunk_gated_delta_rule": "its results are NaN", "npu_recurrent_gated_delta_rule": "it raises"}
    for module in (states, decode_states):
        monkeypatch.setattr(module, "why_wrong", lambda name, device: said[name] if device == "npu" else "")
    graph = recurrence("head", True, replace(CAPTURED, tried_on="npu"))
    reasons = refusals(lower_npu_states(graph.traced))
    assert all(f"npu.{name}: {reason}" in reasons for name, reason in said.items())
    decoded = decode_graph(graph.traced)
    assert decoded is not None
    assert not [name for g in (graph.traced, decoded) for name in operators(g) if "delta_rule" in name]


def test_no_release_has_the_operator_over_chunks_on_950() -> None:
    target = NpuTarget("Ascend950PR", graph_mode="aclgraph", float32_as=torch.bfloat16)
    said = refusals(lower_npu_states(recurrence("head", True, target).traced))
    assert "npu.npu_chunk_gated_delta_rule: Ascend950PR does not run it" in said


def test_a_convolution_alone_has_no_graph_of_its_own() -> None:
    graph = convolution()
    lower_npu_states(graph.traced)
    assert decode_graph(graph.traced) is None


def test_half_precision_keeps_states_in_float32() -> None:
    given = recurrence("head", True)
    arguments = [
        x.bfloat16() if isinstance(x, torch.Tensor) and i != 3 else x
        for i, x in enumerate([*(given.given[f"given_{i}"] for i in range(5)), 0.25, 1e-6])
    ]
    spec = StateSpec("recurrent_state", (4, 8, 16), torch.float32)
    graph = StateGraph(linear_recurrence, arguments, spec, NpuTarget(graph_mode="aclgraph"))
    where = step_of(COUNTS, spec.shape, spec.dtype)
    expected_state, state = where[0].clone(), where[0].clone()
    expected = graph.run(expected_state, *where[1:])
    record = lower_npu_states(graph.traced)
    assert record.routes[0].chosen[-1] == "npu.npu_scatter_nd_update_"
    found = graph.run(state, *where[1:])
    assert found.dtype is torch.bfloat16 and state.dtype is torch.float32
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    torch.testing.assert_close(state, expected_state, atol=0.05, rtol=0.05, equal_nan=True)
    assert_legal(graph.traced)


REFUSED = {
    ("head", True, "ge", 16): "npu.npu_chunk_gated_delta_rule: torchair's GE converter for it raises",
    ("channel", True, "aclgraph", 16): "npu.npu_chunk_gated_delta_rule: it knows no decay of each key channel",
    (
        "head",
        False,
        "aclgraph",
        16,
    ): "npu.npu_chunk_gated_delta_rule: it is the delta rule, and this recurrence",
    ("head", True, "aclgraph", 136): "npu.npu_chunk_gated_delta_rule: it has heads of (136, 8) dims; at most 128",
}


@pytest.mark.parametrize(("kind", "delta", "graph_mode", "dim"), REFUSED)
def test_why_no_fused_delta_rule(kind: str, delta: bool, graph_mode: str, dim: int) -> None:
    graph = recurrence(kind, delta, NpuTarget(graph_mode=graph_mode, float32_as=torch.bfloat16), dim)
    said = refusals(lower_npu_states(graph.traced))
    assert REFUSED[kind, delta, graph_mode, dim] in said
    recurrent = "npu.npu_recurrent_gated_delta_rule: it is documented for single calls and graphs of fixed sizes"
    assert (recurrent in said) == (delta and graph_mode == "ge")
    assert not [name for name in operators(graph.traced) if "delta_rule" in name]


def test_float32_has_no_fused_delta_rule() -> None:
    said = refusals(lower_npu_states(recurrence("head", True, NpuTarget(graph_mode="aclgraph")).traced))
    assert "query is torch.float32; it must be torch.bfloat16" in said


REASONS = {
    ("Ascend910B3", 3, ""): "npu.npu_fused_causal_conv1d: Ascend910B3 does not run it",
    ("Ascend950PR", 4, ""): "npu.npu_fused_causal_conv1d: it has 3 taps, not 4",
    ("Ascend950PR", 3, "silu"): "npu.npu_fused_causal_conv1d: it ignores its activation, here silu",
    ("Ascend950PR", 3, ""): "npu.npu_fused_causal_conv1d: it writes the slot that it reads, and a step may read a "
    "snapshot that has to stay",
}


@pytest.mark.parametrize(("soc", "taps", "activation"), REASONS)
def test_why_no_fused_convolution(soc: str, taps: int, activation: str) -> None:
    traced = convolution(taps, activation, NpuTarget(soc, float32_as=torch.bfloat16)).traced
    reason = REASONS[soc, taps, activation]
    assert refusals(lower_npu_states(traced)) == reason
    assert operators(traced).count("npu.npu_scatter_nd_update_") == 1


def test_a_chip_without_bfloat16() -> None:
    traced = convolution(target=NpuTarget("Ascend310P3", float32_as=torch.bfloat16)).traced
    with pytest.raises(UnsupportedModel, match=r"has no bfloat16; give dtype='float16'"):
        lower_npu_states(traced)
