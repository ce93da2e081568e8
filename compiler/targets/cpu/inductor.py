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
    """True if inductor has something to gain: on average a decoder layer holds an operator that it would fuse.

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
    # Packed weights are opaque: they have no strides that the generated code could assert.
    opaque = torch._inductor.config.patch(size_asserts=not traced.notes.packed)
    with tracing(context), opaque, torch.no_grad():
        return cast("Callable[..., Sequence[Any]]", compile_fx(traced.module, examples))
