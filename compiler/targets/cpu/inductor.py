"""The CPU target with inductor's code around our kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from ....passes import TracedGraph
from ....passes.graph.fx_nodes import callee, value
from ....passes.graph.provenance import decoder_layers, launches_work
from ....runtime.phases import phase

_SINGLE = frozenset("linear mm addmm bmm baddbmm _grouped_mm embedding index_select".split())


def is_fusible(traced: TracedGraph) -> bool:
    """Whether inductor has something to gain: on average a decoder layer holds an operator that it would fuse.

    Matrix products, gathers and our own operators stay single calls in its code too. Around nothing else it buys
    no time, and costs the compilation.
    """
    layers = decoder_layers(traced.graph)
    left = sum(launches_work(node) and not _stays_single(node) for node in layers.of)
    return left >= len(layers.paths)


def _stays_single(node: fx.Node) -> bool:
    ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "pagoda"
    return ours or callee(node) in _SINGLE


@phase("codegen")
def generate_code(traced: TracedGraph, context: TracingContext) -> Callable[..., Sequence[Any]]:
    """Compile a traced graph with inductor.

    Args:
        traced: the rewritten graph; placeholders carry fake values of ``context``'s fake mode.
        context: the context that the graph was traced in; its shape environment owns the symbols.

    Returns:
        a function of the placeholders' values, in order, that returns the graph's outputs.
    """
    # Imported here: it takes more than half a second, and most programs need none of it.
    from torch._inductor.compile_fx import compile_fx

    traced.recompile()
    examples = [value(n) for n in traced.placeholders]
    with tracing(context), torch.no_grad():
        if not traced.notes.packed:
            return cast("Callable[..., Sequence[Any]]", compile_fx(traced.module, examples))
        # Packed weights are opaque: they have no strides that the generated code could assert.
        with torch._inductor.config.patch(size_asserts=False):
            module, count = _returning_sizes(traced)
            run = cast("Callable[..., Sequence[Any]]", compile_fx(module, examples))
    return lambda *args: run(*args)[:count]


def _returning_sizes(traced: TracedGraph) -> tuple[fx.GraphModule, int]:
    """A copy of the graph that returns the variable sizes of its inputs besides, and how many outputs it had.

    Without assertions inductor's code (torch 2.15) knows sizes of inputs only if the graph itself asks for them.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = cast("Sequence[Any]", graph.graph_copy(traced.graph, copies))
    sizes: dict[Any, fx.Node] = {}
    for node in traced.placeholders:
        if not isinstance(example := value(node), torch.Tensor):
            continue
        for dim, size in enumerate(example.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in sizes:
                sizes[size.node.expr] = graph.call_function(torch.ops.aten.sym_size.int, (copies[node], dim))
    graph.output((*outputs, *sizes.values()))
    return fx.GraphModule(traced.module, graph), len(outputs)
