"""Calls that also run as a GE graph of their own, because the operator's documents lack their form.

A call by itself goes through aclnn's checks, one in a graph through the checks of the graph engine: a form that only
the operator's definition has may pass one and not the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ...compiler.targets.npu.ge.ge_route import compile_module
from .operator_check import OperatorCall

__all__ = ["is_undocumented", "through_ge"]


def is_undocumented(call: OperatorCall) -> bool:
    """True for scales in float32 beside bfloat16 in npu_add_rms_norm_quant (``limits.quantized.norm_by_scales``)."""
    if call.operator != "npu_add_rms_norm_quant":
        return False
    return call.args[0].dtype is torch.bfloat16 and call.args[3].dtype is torch.float32


def through_ge(call: OperatorCall, soc: str) -> Callable[..., Any]:
    """A function with the operator's parameters that runs it as a GE graph, compiled at the first call.

    Args:
        call: the call; of its results, the graph yields those that are compared.
        soc: name of the chip.
    """
    compiled: list[Callable[..., Any]] = []

    def run(*args: Any, **kwargs: Any) -> list[Tensor | None]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not compiled:
            compiled.append(compile_module(*_module(call, leaves, spec), soc))
        results = compiled[0](*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        found = dict(zip(call.expected, results, strict=True))
        return [found.get(i) for i in range(max(found) + 1)]

    return run


def _module(
    call: OperatorCall, leaves: list[Any], spec: pytree.TreeSpec
) -> tuple[fx.GraphModule, list[Any], FakeTensorMode]:
    """A module of the call alone, with the values of its inputs and their mode."""
    graph, mode = fx.Graph(), FakeTensorMode()
    values: list[Any] = []
    nodes: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            nodes.append(graph.placeholder(f"input_{len(values)}"))
            values.append(mode.from_tensor(leaf))
        else:
            nodes.append(leaf)
    args, kwargs = pytree.tree_unflatten(nodes, spec)
    results = graph.call_function(call.target, args, kwargs)
    graph.output(tuple(graph.call_function(operator.getitem, (results, i)) for i in call.expected))
    return fx.GraphModule({}, graph), values, mode
