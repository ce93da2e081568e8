"""Decompose what no lowering took.

Matches:
    any pagoda:: operator that is left
    aten.std, for the graph engine
Becomes:
    the ATen operators of its reference implementation
Why:
    the operators of ours have kernels for CPUs alone; torchair reads sizes on the host for std, which graphs of fixed
    sizes cannot do.

Level 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ....runtime.ops import OPERATORS
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph
from .site import Lowering, lower_each


def spell_out_leftovers(traced: TracedGraph) -> PassRecord:
    """Replace what is left of the canonical operators, so that the graph runs where they are not known.

    Raises:
        ValueError: an operator has no decomposition for the target.
    """
    formulas = {overload: own.reference for overload, own in OPERATORS.items() if own.facts.spelled_out}
    for node in traced.graph.nodes:
        if node.target in OPERATORS and node.target not in formulas:
            raise ValueError(f"{node.name} ({node.target}) has no form for {traced.npu}")
    if traced.npu is not None and traced.npu.graph_mode == "ge":
        formulas[torch.ops.aten.std.correction] = std_reference
    return lower_each(
        traced, "spell_out_leftovers", {operator: _decomposed(formula) for operator, formula in formulas.items()}
    )


def std_reference(
    x: torch.Tensor, dim: Sequence[int] | None = None, correction: float | None = None, keepdim: bool = False
) -> torch.Tensor:
    """Compute ``aten.std`` with elementary operators, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = list(dim or range(x.dim()))
    count = math.prod(x.shape[d] for d in dims)
    squares = (wide - wide.mean(dims, keepdim=True)).square().sum(dims, keepdim=keepdim)
    return (squares / (count - (1 if correction is None else correction))).sqrt().to(x.dtype)


def _decomposed(formula: Callable[..., Any]) -> Lowering:
    return lambda site, *args: site.inline(partial(formula, **site.node.kwargs), *args)
