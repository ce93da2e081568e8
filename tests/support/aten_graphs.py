"""ATen graphs of small modules, as passes of the second stage see them, and a way to run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from torch_pagoda.compiler.capture.aten import to_aten
from torch_pagoda.compiler.options import CompileOptions, selected_passes
from torch_pagoda.compiler.weights.merged_weights import link_merged_weights
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.fx_nodes import value

import shared_graphs
from tiny_models import build_tiny_model

_tiny: dict[str, TracedGraph] = {}


def aten_of_model(model: nn.Module) -> TracedGraph:
    """The paged ATen graph of a causal LM, before any pass on it."""
    captured = shared_graphs.capture(model)
    shared_graphs.run_passes(captured.traced, selected_passes(CompileOptions(opt_level=0), "dynamo"))
    return shared_graphs.to_aten(captured.traced, captured.context)


def aten_of_tiny_model(model_type: str, **overrides: Any) -> TracedGraph:
    """A copy of the paged ATen graph of a tiny model, which is traced once.

    The copies share their weights: do not link one into a program, which may merge them.
    """
    key = f"{model_type} {overrides}"
    if key not in _tiny:
        _tiny[key] = aten_of_model(build_tiny_model(model_type, **overrides))
    return _tiny[key].copy()


def aten_of_module(module: nn.Module, *inputs: torch.Tensor, dynamic: tuple[int, ...] = (1,)) -> TracedGraph:
    """The ATen graph of a call, which yields one tensor, as a drop-in graph with the parameters as constants.

    Args:
        module: what is called.
        inputs: tensors that it takes.
        dynamic: their dims that vary.
    """
    caught: dict[str, Any] = {}

    def backend(gm: torch.fx.GraphModule, given: list[Any]) -> Any:
        caught.update(gm=gm, given=given, context=TracingContext.get())
        return gm.forward

    for tensor in inputs:
        for dim in dynamic:
            torch._dynamo.mark_dynamic(tensor, dim)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    mode = next(value(n).fake_mode for n in caught["gm"].graph.nodes if isinstance(value(n), FakeTensor))
    traced = TracedGraph(caught["gm"], mode, {}, paged=False)
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for node, given in zip(traced.placeholders, caught["given"], strict=True):
        if id(given) in own:
            traced.constants[node.name] = given
    caught["context"].fake_mode = mode
    return to_aten(traced, caught["context"])


def run_graph(traced: TracedGraph, *inputs: torch.Tensor) -> torch.Tensor:
    """The first output of a graph, whose sizes are read off the inputs."""
    link_merged_weights(traced)
    traced.recompile()
    given, free, symbols = [], list(inputs), {}
    tensors = [
        n for n in traced.placeholders if isinstance(value(n), torch.Tensor) and n.name not in traced.constants
    ]
    for node, tensor in zip(tensors, free, strict=True):
        for size, number in zip(value(node).shape, tensor.shape, strict=True):
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = number
    for node in traced.placeholders:
        if node.name in traced.constants:
            given.append(traced.constants[node.name])
        elif isinstance(value(node), torch.Tensor):
            given.append(free.pop(0))
        else:
            given.append(symbols[value(node).node.expr])
    with torch.no_grad():
        return traced.module(*given)[0]
