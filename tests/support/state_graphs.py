"""Graphs that are one operator with state of a flat step, to be lowered for an NPU and run by reference kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_pagoda.passes import TracedGraph
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.program import StateSpec
from torch_pagoda.runtime.step_metadata import StepMetadata

WHERE = ("query_start_loc", "state_read", "state_write")


class StateGraph:
    """One call of an operator with state.

    Args:
        operator: such as ``pagoda::causal_conv1d``.
        arguments: those in front of the state; tensors ``[1, T, ...]`` are inputs, others are weights.
        state: what it keeps.
        target: the chip.
    """

    def __init__(
        self, operator: Any, arguments: list[Any], state: StateSpec, target: NpuTarget | None = None
    ) -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        module = fx.GraphModule(nn.Module(), fx.Graph())
        self.traced = traced = TracedGraph(module, mode, {}, input_ids="input_ids")
        self.given: dict[str, torch.Tensor] = {}

        def placeholder(name: str, example: torch.Tensor, dynamic: bool) -> fx.Node:
            sizes = [DimDynamic.DUCK if dynamic and i == 1 else DimDynamic.STATIC for i in range(example.dim())]
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
            node = module.graph.placeholder(name)
            node.meta["example_value"] = mode.from_tensor(example, source=LocalSource(name), symbolic_context=context)
            self.given[name] = example
            return node

        tokens = next(x.shape[1] for x in arguments if isinstance(x, torch.Tensor) and x.dim() > 2)
        placeholder("input_ids", torch.zeros(1, tokens, dtype=torch.int64), True)
        nodes = [
            placeholder(f"given_{i}", x, x.dim() > 2) if isinstance(x, torch.Tensor) else x
            for i, x in enumerate(arguments)
        ]
        output = module.graph.output(())
        (cache,) = traced.add_cache(state)
        metadata = [traced.step_input(name) for name in WHERE]
        with traced.graph.inserting_before(output):
            result = traced.call(operator, *nodes, cache, *metadata)
        output.args = ((result,),)
        traced.npu = target or NpuTarget(float32_as=torch.bfloat16)

    def run(self, state: torch.Tensor, starts: torch.Tensor, read: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
        """The result of the step; ``state`` is written."""
        traced = self.traced
        traced.recompile()
        none = torch.zeros(0, dtype=torch.int64)
        step = StepMetadata(none, none, starts, none, none, none, (), read, write)
        given = {**self.given, **traced.constants, f"{traced.caches[0].parts()[0].name}_0": state}
        values = [given[n.name] if n.name in given else step.field(n.name) for n in traced.placeholders]
        with torch.no_grad():
            return traced.module(*values)[0]  # type: ignore[no-any-return]


def step_of(counts: list[int], unit: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """States, offsets, and slots read and written: every second sequence begins; slots that nobody reads are NaN."""
    sequences = len(counts)
    state = torch.full((2 * sequences + 1, *unit), torch.nan, dtype=dtype)
    read = torch.tensor([2 * s if s % 2 else -1 for s in range(sequences)], dtype=torch.int32)
    # Some write where they read, others leave it behind.
    write = torch.tensor([2 * s + (s % 4 < 2) for s in range(sequences)], dtype=torch.int32)
    for slot in read.tolist():
        if slot >= 0:
            state[slot] = torch.randn(unit, dtype=dtype)
    return state, torch.tensor([0, *counts]).cumsum(0).int(), read, write
