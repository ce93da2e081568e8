"""Static graphs of decode steps without torchair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.compiler.targets.npu.ge.static_graph import StaticGraph, static_graph
from torch_pagoda.compiler.targets.npu.route import Run
from torch_pagoda.passes import TracedGraph

from device_lengths import attention_by_tensors


class AsItIs(GeGraphs):
    """The route without torchair: graphs run as they are.

    Attributes:
        copies: the graphs of fixed sizes that were made.
        steps: number of sequences of each step that one of them ran.
    """

    def __init__(self, traced: TracedGraph, **options: Any) -> None:
        super().__init__(traced, static_decode=True, **options)
        self.copies: list[StaticGraph] = []
        self.steps: list[int] = []
        self._ids_at = [node.name for node in traced.placeholders].index(traced.input_ids)

    def _compile(self, length: int) -> Run:
        return self.traced.module

    def _compile_static(self, inputs: Mapping[str, torch.Tensor]) -> Run:
        copy = static_graph(self.traced, inputs, attention_by_tensors())
        self.copies.append(copy)

        def run(*args: Any) -> Sequence[Any]:
            flat = copy.flatten(args)
            for given, expected in zip(flat, copy.values, strict=True):
                assert given.shape == expected.shape and given.dtype == expected.dtype
            self.steps.append(args[self._ids_at].shape[1])
            return copy.module(*flat)

        return run
