"""Weights of lowered models that can be fetched before they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduled_models import SLOW, prefetched, scheduled
from torch import fx

from torch_pagoda.compiler.costs.launch_costs import launch_costs
from torch_pagoda.compiler.costs.schedules import l2_cache, why_not_fetched
from torch_pagoda.compiler.costs.traffic import Step
from torch_pagoda.compiler.targets.npu.socs import chip
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.provenance import launches_work, operator_name
from torch_pagoda.passes.schedule import schedule_prefetch as module
from torch_pagoda.passes.schedule.launches import Cost
from torch_pagoda.passes.schedule.schedule_branches import Branch, schedule_branches
from torch_pagoda.passes.schedule.schedule_prefetch import (
    BANDWIDTH_SHARE,
    LEAST_WINDOW,
    PREFETCH,
    WEIGHTS,
    Fetch,
    L2Cache,
    schedule_prefetch,
    stored_bytes,
    weight_arguments,
    whole_input,
)

DECODE = Step(1, 1024, 1)


def _names(nodes: Any) -> list[str]:
    return [operator_name(node).rpartition(".")[2].removeprefix("npu_") for node in nodes]


def _code(traced: TracedGraph) -> list[str]:
    return [str(node.format_node()) for node in traced.graph.nodes]


def _holds(traced: TracedGraph, costs: Any, cache: L2Cache, found: list[Fetch]) -> None:
    """Each weight once, while the memory is idle, before it is read, in the order of reading, no more than there is
    time and room for."""
    order = [node for node in traced.graph.nodes if launches_work(node)]
    place = {node: i for i, node in enumerate(order)}
    assert len({fetch.weight for fetch in found}) == len(found)
    readers = [place[fetch.reader] for fetch in found]
    assert readers == sorted(readers)
    for fetch in found:
        first, last = place[fetch.window[0]], place[fetch.window[-1]]
        assert fetch.window == tuple(order[first : last + 1])
        assert place[fetch.behind] == first - 1 and last < place[fetch.reader]
        assert not any(costs[node].memory_bound for node in fetch.window)
        assert costs[fetch.behind].memory_bound and costs[fetch.reader].memory_bound
        assert fetch.idle >= LEAST_WINDOW
        assert 0 < fetch.bytes <= stored_bytes(fetch.weight) and fetch.bytes < cache.size
        assert 0 < fetch.gain < costs[fetch.reader].seconds
        between = order[first : place[fetch.reader]]
        passing = sum(costs[node].memory for node in between) * cache.memory_bandwidth
        assert fetch.bytes + passing <= cache.size / 2 + 1
    for behind in {fetch.behind for fetch in found}:
        together = [fetch for fetch in found if fetch.behind is behind]
        most = BANDWIDTH_SHARE * cache.memory_bandwidth * together[0].idle
        assert sum(fetch.bytes for fetch in together) <= most


@pytest.mark.parametrize(
    ("model_type", "readers", "windows"),
    [
        ("llama", [], []),  # one rotation and the write into the cache are too short to fetch anything behind them
        (
            "gpt_neox",
            ["attention.dense"],
            [["constant_pad_nd", "constant_pad_nd", "rotary_mul", "rotary_mul", "scatter_pa_kv_cache"]],
        ),
        pytest.param(
            "qwen2_moe",
            ["self_attn.q_proj", "lm_head"],
            [["swiglu", "grouped_matmul", "sigmoid", "mul", "moe_finalize_routing", "add_rms_norm"]] * 2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_weights_are_fetched_while_the_memory_is_idle(model_type, readers, windows):
    traced, _ = scheduled(model_type, "ge", schedule=False)
    before, costs, cache = _code(traced), launch_costs(traced, SLOW, DECODE), l2_cache(SLOW)
    record, found = schedule_prefetch(traced, costs, cache)
    assert record.matches == len(found) and _code(traced) == before
    _holds(traced, costs, cache, found)
    assert [fetch.name for fetch in found] == ["weight"] * len(found)
    said = [fetch.weight.name for fetch in found[: len(readers)]]
    assert all(part.rpartition(".")[2] in name for part, name in zip(readers, said, strict=True))
    assert [_names(fetch.window) for fetch in found] == windows
    assert all("attention_score" not in name for fetch in found for name in _names(fetch.window))
    noted = {node: node.meta["custom"][PREFETCH] for node in traced.graph.nodes if _noted(node)}
    assert set(noted) == {node for fetch in found for node in (fetch.behind, fetch.reader)}
    for number, fetch in enumerate(found):
        assert number in noted[fetch.behind]["starts"]
        assert noted[fetch.reader]["reads"][number] == (fetch.name, fetch.bytes, cache.size // 2)
    again, same = schedule_prefetch(traced, costs, cache)
    assert same == found and again == record
    assert noted == {node: node.meta["custom"][PREFETCH] for node in traced.graph.nodes if _noted(node)}


def _noted(node: fx.Node) -> bool:
    return PREFETCH in (node.meta.get("custom") or {})


def test_where_nothing_is_fetched_the_record_says_why():
    _, found, record = prefetched("llama")
    reasons = {each.node: each.reason for each in record.rejections}
    assert "no launch before says when" in reasons["embedding"]
    norms = [reason for node, reason in reasons.items() if "rms_norm" in node]
    assert norms and all("leaves the memory idle for 1.9 µs, less than 5" in reason for reason in norms)
    assert len(found) == 2


def test_experts_are_left_alone():
    _, found, record = prefetched("qwen2_moe", "ge")
    assert any("reads those experts that tokens are sent to" in each.reason for each in record.rejections)
    assert not any("grouped" in fetch.reader.name for fetch in found)


@pytest.mark.parametrize(("model_type", "count"), [("qwen2_moe", 2), ("gpt_neox", 0)])
def test_launches_beside_a_branch_are_left_alone(model_type, count):
    traced, found, record = prefetched(model_type, streams=True)
    assert count or any("to a branch on the second stream" in each.reason for each in record.rejections)
    costs = launch_costs(traced, SLOW, DECODE)
    _, branches = schedule_branches(traced, costs)
    apart = {node for branch in branches for node in (*branch.side, *branch.main, branch.join)}
    assert branches and len(found) == count
    for fetch in found:
        assert apart.isdisjoint((fetch.reader, *fetch.window))
        # Nothing of a branch comes between a fetch and its reader.
        order = list(traced.graph.nodes)
        between = order[order.index(fetch.behind) + 1 : order.index(fetch.reader)]
        assert apart.isdisjoint(between)


def test_no_more_than_half_of_the_cache_is_filled():
    """Attention over a long context reads what leaves no room, and a cache that is too small takes nothing."""
    traced, _ = scheduled("llama", schedule=False)
    costs = launch_costs(traced, SLOW, Step(1, 4096, 1))
    cache = l2_cache(SLOW)
    assert not schedule_prefetch(traced, costs, replace(cache, size=2**17))[1]
    for size, fetched in ((2**25, 2), (2**23, 0)):
        record, found = schedule_prefetch(traced, costs, replace(cache, size=size))
        _holds(traced, costs, replace(cache, size=size), found)
        full = [each for each in record.rejections if "fill 50% of the L2 cache" in each.reason]
        assert len(found) == fetched and bool(full) != bool(fetched)
        assert all("attention_score" in each.node for each in full)


# A graph written here: p, then four launches that leave the memory idle, then products.


def _graph(weights: int = 2, *, same: bool = False, view: bool = False) -> tuple[TracedGraph, dict[fx.Node, Cost]]:
    traced, _ = scheduled("llama", schedule=False)
    graph, npu = fx.Graph(), torch.ops.npu
    x = graph.placeholder("x")
    given = [graph.placeholder(f"w{i}") for i in range(weights + 1)]
    for node in (x, *given):
        node.meta["example_value"] = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["example_value"] = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")
        return node

    node = call(npu.npu_linear.default, x, given[0])
    for _ in range(4):
        node = call(torch.ops.aten.neg.default, node)
    idle = [each for each in graph.nodes if each.target is torch.ops.aten.neg.default]
    for weight in given[1:]:
        weight = given[1] if same else weight
        if view:
            weight = call(torch.ops.aten.slice.Tensor, weight, 0, 0, 512)
            weight.meta["example_value"] = weight.args[0].meta["example_value"][:512]
        node = call(npu.npu_linear.default, node, weight)
    graph.output((node,))
    traced.module = fx.GraphModule({}, graph)
    traced.constants = {node.name: torch.empty(0) for node in given}
    costs = {node: Cost(10e-6, 0.0, 2e-6, "cube") for node in graph.nodes}
    costs |= {node: Cost(0.0, 0.0, 2e-6, "vector") for node in idle}
    return traced, costs


CACHE = L2Cache(2**30, 4e12, 1e12)  # 4 MB are fetched in a window of 8 µs; a weight has 2 MiB
WHOLE = 2 * 1024**2


def test_what_is_left_of_a_window_is_for_the_next_weight():
    traced, costs = _graph(3)
    _, found = schedule_prefetch(traced, costs, CACHE)
    assert [(fetch.weight.name, fetch.bytes) for fetch in found] == [("w1", WHOLE), ("w2", 4_000_000 - WHOLE)]
    for fetch in found:
        assert fetch.gain == pytest.approx(fetch.bytes * (1e-12 - 0.25e-12))
        assert fetch.behind.name == "npu_linear_default" and len(fetch.window) == 4


def test_a_weight_is_fetched_once():
    traced, costs = _graph(3, same=True)
    record, found = schedule_prefetch(traced, costs, CACHE)
    assert [fetch.weight.name for fetch in found] == ["w1"]
    assert [each.reason for each in record.rejections] == ["w1 is fetched for an earlier launch"] * 2


def test_a_part_of_a_weight_and_what_is_no_weight_are_not_fetched():
    traced, costs = _graph(1, view=True)
    record, found = schedule_prefetch(traced, costs, CACHE)
    assert not found and "is not a weight of the model as it lies" in record.rejections[0].reason
    assert "no weight is waited for then" in record.rejections[-1].reason
    traced, costs = _graph(1)
    traced.constants = {}
    assert not schedule_prefetch(traced, costs, CACHE)[1]
    part = next(node for node in _graph(1, view=True)[0].graph.nodes if node.name == "slice_tensor")
    assert whole_input(part) is None and whole_input(part.args[0]) is part.args[0]


def test_a_window_that_is_too_short_is_not_used(monkeypatch):
    traced, costs = _graph(1)
    short = {node: replace(cost, floor=1e-6) if cost.memory == 0 else cost for node, cost in costs.items()}
    record, found = schedule_prefetch(traced, short, CACHE)
    assert (
        not found and "and what follows leave the memory idle for 4.0 µs, less than 5" in record.rejections[0].reason
    )
    monkeypatch.setattr(module, "LEAST_WINDOW", 3e-6)
    assert schedule_prefetch(traced, short, CACHE)[1]


def test_a_branch_within_another_is_no_part_of_the_main_stream():
    traced, costs = _graph(3)
    _, *idle, one, two, three = (node for node in traced.graph.nodes if node.op == "call_function")
    outer, inner = Branch(three, (two,), (*idle[:2], one), 0.0, 0.0), Branch(one, (idle[0],), (idle[1],), 0.0, 0.0)
    assert [fetch.reader for fetch in schedule_prefetch(traced, costs, CACHE)[1]] == [one, two]
    record, found = schedule_prefetch(traced, costs, CACHE, [outer, inner])
    assert not found and len(record.rejections) == 2


def test_weights_are_arguments_of_their_operators():
    for name, arguments in WEIGHTS.items():
        packet = name.removeprefix("npu.")
        for form in (packet, f"{packet}_functional") if "mla" in packet else (packet,):
            schema = getattr(torch.ops.npu, form).default._schema
            assert [schema.arguments[place].name for place, _ in arguments] == [each for _, each in arguments]
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "x dq uq uk dkv".split()]
    node = graph.call_function(torch.ops.npu.npu_mla_prolog_v3_functional.default, tuple(given))
    assert [argument.name for _, argument in weight_arguments(node)] == ["dq", "dkv", "uq", "uk"]
    named = graph.call_function(torch.ops.npu.npu_linear.default, (given[0],), {"weight": given[1]})
    assert list(weight_arguments(named)) == [("weight", given[1])]


@pytest.mark.parametrize(
    ("soc", "reason"),
    [
        ("Ascend910B1", ""),
        ("Ascend910B3", "no source gives the L2 cache size of Ascend910B3"),
        ("Ascend310P3", "no source gives vector cores of Ascend310P3"),
        ("Ascend950PR_9589", "no source gives vector cores of Ascend950PR_9589"),
        ("Ascend910Z", "no published figures for Ascend910Z"),
    ],
)
def test_nothing_is_fetched_on_a_chip_whose_cache_is_unknown(soc, reason):
    assert why_not_fetched(chip(soc), soc) == reason
