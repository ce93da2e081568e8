"""The CPU target: inductor, or the rewritten graph as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx

from ...passes import TracedGraph
from ...passes.fx_nodes import value


def generate_code(traced: TracedGraph, context: TracingContext) -> Callable[..., Sequence[Any]]:
    """Compile a traced graph with inductor.

    Args:
        traced: the rewritten graph; placeholders carry fake values of ``context``'s fake mode.
        context: the context that the graph was traced in; its shape environment owns the symbols.

    Returns:
        a function of the placeholders' values, in order, that returns the graph's outputs.
    """
    traced.recompile()
    examples = [value(n) for n in traced.placeholders]
    # Packed weights are opaque: they have no strides that the generated code could assert.
    opaque = torch._inductor.config.patch(size_asserts=not traced.notes.get("packed"))
    with tracing(context), opaque, torch.no_grad():
        return cast("Callable[..., Sequence[Any]]", compile_fx(traced.module, examples))
