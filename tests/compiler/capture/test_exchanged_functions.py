"""Functions of torch's that a program put others in the place of are called once, by graphs, too."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from torch_pagoda.compiler.capture.exchanged_functions import keep_exchanged
from torch_pagoda.passes.graph.fx_nodes import written_arguments


@pytest.fixture(autouse=True)
def rules():
    """What Dynamo takes for torch's is looked up before, and anew behind a test."""
    get_torch_obj_rule_map()
    yield
    get_torch_obj_rule_map.cache_clear()


def graph_of(function, x):
    caught = []

    def backend(gm, inputs):
        keep_exchanged(gm)
        caught.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return caught[0]


@pytest.mark.parametrize("first_use", [False, True])
@pytest.mark.parametrize(
    ("place", "name"), [(F, "silu"), (F, "softplus"), (torch, "exp"), (torch.functional, "norm")]
)
def test_an_exchanged_function_that_calls_the_former_one_is_applied_once(monkeypatch, place, name, first_use):
    former = getattr(place, name)
    monkeypatch.setattr(place, name, lambda x: 2 * former(x))
    if first_use:
        get_torch_obj_rule_map.cache_clear()
    x = torch.randn(5)
    gm = graph_of(lambda x: getattr(place, name)(x), x)
    expected = 2 * former(x)
    for run in (gm, fx.Interpreter(gm).run, make_fx(fx.Interpreter(gm).run)(x)):
        found = run(x)
        assert torch.equal(found[0] if isinstance(found, tuple) else found, expected)


def test_what_is_written_in_place_is_still_told(monkeypatch):
    former = F.relu
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: former(x, inplace=inplace))
    gm = graph_of(lambda x: F.relu(x.clone(), inplace=True), torch.randn(5))
    (call,) = [node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "relu"]
    assert written_arguments(call) == [call.args[0]]


def test_other_graphs_stay_as_they_are():
    gm = graph_of(lambda x: F.silu(x) + torch.exp(x), torch.randn(5))
    assert {F.silu, torch.exp} <= {node.target for node in gm.graph.nodes}
