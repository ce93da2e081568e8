"""What inductor is given to compile."""

from __future__ import annotations

import torch
from aten_graphs import aten_of_model

from torch_pagoda.compiler.targets.cpu.inductor import _returning_sizes
from torch_pagoda.passes.graph.fx_nodes import value

from toy_lm import ToyLM, sdpa


def test_the_sizes_of_inputs_are_asked_for():
    """Where no assertions are compiled, nothing else tells the code of them: torch 2.15 leaves names undefined."""
    traced = aten_of_model(ToyLM(sdpa))
    before = list(traced.graph.nodes)
    module, count = _returning_sizes(traced)
    assert list(traced.graph.nodes) == before

    (outputs,) = next(iter(reversed(module.graph.nodes))).args
    assert count == len(next(iter(reversed(traced.graph.nodes))).args[0])
    returned = {value(size.args[0]).shape[size.args[1]].node.expr for size in outputs[count:]}
    sizes = [
        size.node.expr
        for x in map(value, traced.placeholders)
        for size in (x.shape if isinstance(x, torch.Tensor) else ())
        if isinstance(size, torch.SymInt)
    ]
    assert len(returned) == len(outputs) - count > 1
    assert {symbol for size in sizes for symbol in size.free_symbols} == returned
