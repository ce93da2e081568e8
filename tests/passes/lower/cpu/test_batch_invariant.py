"""`make_batch_invariant`: what it refuses; and graphs that it rewrote are counted as those that they were."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_module, aten_of_tiny_model
from torch import nn
from torch.nn import functional as F

from torch_pagoda.compiler.costs.flops import flops
from torch_pagoda.compiler.costs.traffic import Step
from torch_pagoda.compiler.options import CompileOptions, selected_passes
from torch_pagoda.compiler.pass_runs import run_passes
from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.passes.lower.cpu.batch_invariant import make_batch_invariant
from torch_pagoda.passes.recognize.linear import recognize_linear
from torch_pagoda.reports.expected import expected_matches
from torch_pagoda.runtime.ops.linear.invariant_linear import invariant_linear
from torch_pagoda.runtime.ops.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there are no C++ kernels")


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24, bias=False), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.gate(x)) * self.up(x))


def test_invariant_products_are_still_those_of_a_gated_mlp():
    traced = aten_of_module(GatedMLP(), torch.randn(1, 5, 16))
    recognize_linear(traced)
    assert [e.kind for e in expected_matches(traced.graph)] == ["gated_mlp"]
    assert make_batch_invariant(traced).matches == 3
    assert sum(node.target is invariant_linear for node in traced.graph.nodes) == 3
    assert [e.kind for e in expected_matches(traced.graph)] == ["gated_mlp"]
    assert make_batch_invariant(traced).matches == 0


def test_invariant_products_are_counted_as_products():
    traced = aten_of_tiny_model("llama")
    run_passes(traced, selected_passes(CompileOptions(target="cpu"), "aten"))
    step = Step(3, 7, 1)
    before = flops(traced, traced.graph.nodes, step)
    assert make_batch_invariant(traced).matches
    assert flops(traced, traced.graph.nodes, step) == before > 0


def test_what_cannot_be_kept_is_refused(monkeypatch):
    traced = aten_of_module(GatedMLP(), torch.randn(1, 5, 16))  # its products are not recognized
    with pytest.raises(UnsupportedModel, match=r"is not possible: aten\.addmm.* in gate sums .* omit"):
        make_batch_invariant(traced)
    monkeypatch.setattr("torch_pagoda.passes.lower.cpu.batch_invariant.load_kernels", lambda: None)
    with pytest.raises(UnsupportedModel, match="needs the C"):
        make_batch_invariant(traced)
