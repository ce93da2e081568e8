"""Linears over one input become one: which do, which do not and why, the numbers, and what stays as it was."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_model, aten_of_module, run_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.fake_values import propagate
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes.graph.fx_nodes import callee, shape, value
from torch_pagoda.passes.recognize.linear import recognize_linear
from torch_pagoda.passes.rewrite.merge_linears import merge_linears

from tiny_models import build_tiny_model

WIDTH = 16


class Projections(nn.Module):
    """Linears over one input; ``finish`` makes one tensor of their results."""

    def __init__(self, sizes=(32, 8, 8), bias=(False, False, False), finish=None):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, n, bias=b) for n, b in zip(sizes, bias, strict=True))
        self.finish = finish
        self.requires_grad_(False)

    def forward(self, x):
        results = [part(x) for part in self.parts]
        return torch.cat([r.sin() for r in results], -1) if self.finish is None else self.finish(self, x, results)


def example(batch=2):
    return torch.randn(batch, 5, WIDTH)


def merged(module, *, x=None, dynamic=(1,)):
    graph = aten_of_module(module, example() if x is None else x, dynamic=dynamic)
    recognize_linear(graph)
    return graph, merge_linears(graph)


def linears(graph):
    return [n for n in graph.graph.nodes if callee(n) == "linear"]


def reasons(record):
    return sorted(r.reason for r in record.rejections)


def assert_same_numbers(graph, module, batches=(2,)):
    propagate(graph)
    for batch in batches:
        for tokens in (5, 1, 9):
            x = torch.randn(batch, tokens, WIDTH)
            torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sizes", [(32, 8, 8), (16, 16, 16), (7, 1, 12), (24, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linears_of_one_module_and_input_merge(sizes, with_bias):
    module = Projections(sizes, [with_bias] * len(sizes))
    graph, record = merged(module)
    assert (record.matches, record.rejections) == (1, [])
    (linear,) = linears(graph)
    assert shape(linear.args[1]) == (sum(sizes), WIDTH)
    assert len(linear.args) == (3 if with_bias else 2)
    assert {callee(user) for user in linear.users} == {"slice.Tensor"}
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert_same_numbers(graph, module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_both_sizes_of_the_input_may_vary():
    module = Projections(finish=lambda m, x, r: torch.cat([r[0].view(*x.shape[:2], 8, 4)[..., 0], r[1]], -1))
    graph, record = merged(module, dynamic=(0, 1))
    assert record.matches == 1
    assert_same_numbers(graph, module, batches=(2, 3))


def test_merging_again_changes_nothing():
    graph, _ = merged(Projections())
    graph.recompile()
    code, notes = graph.module.code, graph.notes.copy()
    record = merge_linears(graph)
    graph.recompile()
    assert (record.matches, record.rejections) == (0, [])
    assert (graph.module.code, graph.notes) == (code, notes)


def test_the_pass_alone_moves_no_weight():
    module = Projections()
    places = [p.data_ptr() for p in module.parameters()]
    graph, _ = merged(module)
    merge_linears(graph.copy())
    assert [p.data_ptr() for p in module.parameters()] == places
    assert not set(graph.notes.merged) & set(graph.constants)


def heads(m, x, results):
    """Splits and joins as models do: per-head views, a transpose, all rows as one matrix, and everything flat."""
    q, k, v = results
    q = q.view(*x.shape[:2], 8, 4).transpose(1, 2).reshape(*x.shape[:2], 32)
    k = k.reshape(-1, 8).view(*x.shape[:2], 8)
    return torch.cat([q, k, v.view(-1).view(*x.shape[:2], 8)], -1)


def test_views_that_need_other_strides_get_a_copy():
    module = Projections(finish=heads)
    graph, record = merged(module)
    assert record.matches == 1
    propagate(graph)
    graph.recompile()
    flat = [n for n in graph.graph.nodes if callee(n) == "view" and len(shape(n)) == 1]
    assert [callee(n.args[0]) for n in flat] == ["clone"]
    assert len([n for n in graph.graph.nodes if callee(n) == "clone"]) <= 2
    assert_same_numbers(graph, module)


def test_strides_that_are_written_out_get_a_copy():
    def stretched(m, x, r):
        return torch.cat([r[0].as_strided((2, 5, 4), (160, 32, 2)), r[1], r[2]], -1)

    module = Projections(finish=stretched)
    graph, record = merged(module, dynamic=())
    assert record.matches == 1
    x = example()
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-6, rtol=1e-6)


def test_a_weight_that_something_else_reads_stays():
    module = Projections(finish=lambda m, x, r: torch.cat([*r, x @ m.parts[0].weight.T], -1))
    graph, record = merged(module)
    assert record.matches == 1
    assert len(linears(graph)) == 3
    (rejection,) = record.rejections
    assert rejection.module == "parts.0"
    assert rejection.reason == "linear_default_3 also reads one of its parameters"
    assert_same_numbers(graph, module)


def test_a_layer_that_runs_twice_reads_one_merged_weight():
    module = Projections((WIDTH, 8, 8), [True] * 3, finish=lambda m, x, r: torch.cat([r[0].sin(), r[1], r[2]], -1))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module

        def forward(self, x):
            return self.layer(self.layer(x)[..., :WIDTH].contiguous())

    graph, record = merged(Twice())
    assert (record.matches, record.rejections) == (2, [])
    first, second = linears(graph)
    assert first.args[1:] == second.args[1:]
    assert len(graph.notes.merged) == 2
    assert_same_numbers(graph, Twice())


def test_a_layer_that_runs_twice_and_once_in_parts_stays():
    module = Projections((WIDTH, 8, 8), finish=lambda m, x, r: torch.cat(r, -1))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module

        def forward(self, x):
            y = self.layer(x)
            return torch.cat([self.layer(y[..., :WIDTH].contiguous()), self.layer.parts[0](y[..., 16:])], -1)

    graph, record = merged(Twice())
    assert record.matches == 2
    assert len(record.rejections) == 2
    assert len(linears(graph)) == 5
    assert_same_numbers(graph, Twice())


def test_one_weight_twice_over_one_input_stays():
    module = Projections((8, 8, 8))
    module.parts[1] = module.parts[0]
    graph, record = merged(module)
    assert (record.matches, len(linears(graph))) == (0, 3)
    assert_same_numbers(graph, module)


def test_a_shared_bias_stays():
    module = Projections(bias=[True] * 3)
    module.parts[2].bias = module.parts[1].bias
    _, record = merged(module)
    assert record.matches == 0
    assert sum("also reads one of its parameters" in reason for reason in reasons(record)) == 2


def test_parameters_that_share_memory_stay():
    module = Projections((8, 8, 8))
    module.parts[1].weight = nn.Parameter(module.parts[0].weight.detach().view(8, WIDTH), requires_grad=False)
    graph, record = merged(module)
    assert record.matches == 0
    assert len([r for r in reasons(record) if "shares memory with" in r]) == 2
    assert_same_numbers(graph, module)


def test_a_layer_with_a_bias_among_layers_without():
    module = Projections(bias=[True, False, False])
    graph, record = merged(module)
    assert record.matches == 1
    assert reasons(record) == ["its neighbors differ from it: they have no bias"]
    assert_same_numbers(graph, module)


def test_computed_weights_stay():
    module = Projections()
    nn.utils.parametrizations.weight_norm(module.parts[1])
    module.requires_grad_(False)
    graph, record = merged(module)
    assert record.matches == 1
    assert reasons(record) == ["its weight is computed, not a parameter"]
    assert_same_numbers(graph, module)


def test_stored_transposes_and_odd_layouts_stay():
    module = Projections((8, 8, 8), finish=lambda m, x, r: torch.cat([*r, x @ m.extra], -1))
    module.extra = nn.Parameter(torch.randn(WIDTH, 4), requires_grad=False)
    module.parts[0].weight.data = torch.randn(WIDTH, 8).T
    graph, record = merged(module)
    assert record.matches == 1
    assert "its weight is not contiguous" in reasons(record)
    assert_same_numbers(graph, module)


def test_different_inputs_and_modules_stay_apart():
    def other_input(m, x, r):
        return torch.cat([r[0], m.parts[1](x + 1), m.parts[2](x * 2)], -1)

    graph, record = merged(Projections(finish=other_input))
    assert (record.matches, len(linears(graph))) == (0, 3)

    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.mlp = Projections(), Projections((16, 16), (False, False))

        def forward(self, x):
            return torch.cat([self.attention(x), self.mlp(x)], -1)

    module = Parallel()
    graph, record = merged(module)
    assert (record.matches, len(linears(graph))) == (2, 2)
    assert_same_numbers(graph, module)


def test_routers_stay():
    def routed(m, x, r):
        return torch.cat([r[0].softmax(-1), r[1].float().topk(2)[0], r[2]], -1)

    graph, record = merged(Projections(finish=routed))
    assert (record.matches, record.rejections, len(linears(graph))) == (0, [], 3)


def test_a_lone_linear_leaves_the_graph_as_it_is():
    graph = aten_of_module(Projections((8,), (True,)), example())
    recognize_linear(graph)
    graph.recompile()
    code = graph.module.code
    record = merge_linears(graph)
    graph.recompile()
    assert (record.matches, record.rejections, graph.module.code) == (0, [], code)
    assert not graph.notes.merged


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 24), min_size=2, max_size=4),
    biases=st.lists(st.booleans(), min_size=4, max_size=4),
    extra_user=st.none() | st.integers(0, 3),
    tokens=st.integers(1, 7),
)
def test_numbers_stay_whether_or_not_it_fires(sizes, biases, extra_user, tokens):
    def finish(m, x, r):
        parts = [r.sin() for r in r]
        if extra_user is not None and extra_user < len(sizes):
            parts.append(x * m.parts[extra_user].weight.sum())
        return torch.cat(parts, -1)

    module = Projections(sizes, biases[: len(sizes)], finish)
    graph, record = merged(module)
    free = [b for i, b in enumerate(biases[: len(sizes)]) if i != extra_user]
    assert record.matches == sum(free.count(kind) > 1 for kind in (True, False))
    x = torch.randn(2, tokens, WIDTH)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "layers", "groups"),
    [("llama", 1, 2), ("llama", 2, 4), ("deepseek_v3", 2, 4)],
)
def test_whole_models_by_the_layer(name, layers, groups):
    model = build_tiny_model(name, num_hidden_layers=layers)
    reference = reference_of_model(model)
    graph = aten_of_model(model)
    recognize_linear(graph)
    record = merge_linears(graph)
    assert (record.matches, record.rejections) == (groups, [])
    propagate(graph)
    graph.recompile()
    verdict = check(link(graph, graph.module), reference)
    assert verdict.ok
    assert verdict.error < 1e-4
    assert any(isinstance(size, torch.SymInt) for size in value(linears(graph)[0]).shape), "the tokens stay dynamic"
