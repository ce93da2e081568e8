"""ATen graphs compute what Dynamo's do, whichever way they were traced, and write into graph inputs only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from aten_graphs import aten_of_module, run_graph
from torch import fx, nn
from torch._guards import tracing

from torch_pagoda.compiler.capture import aten
from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.options import CompileOptions, selected_passes
from torch_pagoda.compiler.pass_runs import run_passes
from torch_pagoda.passes.graph.fx_nodes import mutated_arguments, value

from tiny_models import build_tiny_model


@pytest.fixture
def by_autograd(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that AOTAutograd traced."""
    graphs: list[Any] = []
    trace = aten._trace_functionally
    monkeypatch.setattr(aten, "_trace_functionally", lambda traced: graphs.append(traced) or trace(traced))
    return graphs


class Calls(nn.Module):
    """Calls a function, of the input and of a buffer."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("buffer", torch.arange(4.0))

    def forward(self, x):
        return self.function(x, self.buffer) * 2


def permuted(x, buffer):
    inverse = torch.empty(4, dtype=torch.int64)
    order = x[0, 0].argsort()
    inverse[order] = torch.arange(4)
    return x[..., inverse]


def accumulated(x, buffer):
    return (x * 2).add_(buffer).mul_(x)


def read_through_a_view(x, buffer):
    doubled = x * 2
    flat = doubled.view(-1, 4)
    doubled.add_(buffer)
    return flat + 1


def written_through_a_view(x, buffer):
    doubled = x * 2
    doubled.view(-1, 4).add_(buffer)
    return doubled


def written_in_part(x, buffer):
    zeros = torch.zeros_like(x)
    zeros[..., 1:3] = x[..., :2]
    return zeros + buffer


def copied(x, buffer):
    return torch.empty_like(x).copy_(buffer)


def rounded(x, buffer):
    return x.to(torch.bfloat16).add_(buffer)


def broadcast_later(x, buffer):
    return (x * 2).masked_fill_(x > 0, 1.0) + (x * 3).clamp_(min=0)


@pytest.mark.parametrize("function", [permuted, accumulated, broadcast_later])
def test_writes_into_temporaries_return_instead(function, by_autograd):
    check(function)
    assert not by_autograd


@pytest.mark.parametrize("function", [read_through_a_view, written_through_a_view, written_in_part, copied, rounded])
def test_writes_that_are_seen_elsewhere_go_to_autograd(function, by_autograd):
    check(function)
    assert len(by_autograd) == 1


def check(function: Callable[..., torch.Tensor]) -> None:
    module = Calls(function)
    x = torch.randn(2, 6, 4)
    graph = aten_of_module(module, x)
    assert not any(mutated_arguments(node) for node in graph.graph.nodes), graph.graph
    for length in (6, 9):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(run_graph(graph, x), module(x))


def test_a_write_into_a_graph_input_is_left(by_autograd):
    def count(x, buffer):
        buffer.add_(1)
        return x + buffer

    module = Calls(count)
    x = torch.randn(2, 6, 4)
    graph = aten_of_module(module, x)
    module.buffer.copy_(torch.arange(4.0))
    assert len(by_autograd) == 1
    for _ in range(2):
        before = module.buffer.clone()
        torch.testing.assert_close(run_graph(graph, x), (x + before + 1) * 2)
        torch.testing.assert_close(module.buffer, before + 1)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "falcon_h1"])
def test_the_graph_of_a_model_is_autograds(kind, by_autograd):
    """Node by node, but for names, and for where sizes are read off."""
    captured = capture(build_tiny_model(kind))
    run_passes(captured.traced, selected_passes(CompileOptions(), "dynamo"))
    found = aten.to_aten(captured.traced, captured.context)
    assert not by_autograd
    with tracing(captured.context), torch.no_grad():
        expected = aten._named_alike(aten._trace_functionally(captured.traced), captured.traced)
    aten.write_in_place(expected)
    assert described(found.graph) == described(expected.graph)


def described(graph: fx.Graph) -> list[tuple[str, ...]]:
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        arguments = str(fx.map_arg((node.args, node.kwargs), lambda n: _Name(names[n])))
        if node.target is torch.ops.aten.sym_size.int:
            names[node] = f"size of {arguments}"
            continue
        names[node] = f"%{len(lines)}"
        example = value(node)
        form = (
            (example.dtype, tuple(example.shape), example.stride()) if isinstance(example, torch.Tensor) else example
        )
        scopes = node.meta.get("nn_module_stack"), node.meta.get("stack_trace") if node.op != "placeholder" else None
        lines.append((node.op, str(node.target), arguments, str(form), str(scopes)))
    return lines


class _Name(str):
    """Prints without quotes, so that all arguments can be printed at once."""

    __repr__ = str.__str__
