"""Moves the constants of a graph to the device that runs it: those of one of several ranks come from files."""

from __future__ import annotations

import torch

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import value


def place_weights(traced: TracedGraph) -> None:
    """Hold each constant on the device of the graph's ids; one that several inputs receive is moved once."""
    device = value(traced.placeholder(traced.input_ids)).device
    moved: dict[int, torch.Tensor] = {}
    for name, tensor in traced.constants.items():
        if tensor.device != device:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.detach().to(device)
            traced.constants[name] = moved[id(tensor)]
