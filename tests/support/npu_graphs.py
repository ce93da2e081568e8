"""Graphs of single canonical operators, to be lowered for an NPU and run by the reference kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from aten_graphs import aten_of_module, run_graph
from npu_calls import illegal_calls
from torch import fx, nn
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_pagoda.passes import PassRecord, TracedGraph
from torch_pagoda.passes.graph.attention_node import PAGED_ATTENTION
from torch_pagoda.passes.graph.fx_nodes import is_dynamic, shape
from torch_pagoda.passes.graph.provenance import operator_name
from torch_pagoda.passes.rewrite.remove_noops import remove_noops
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.program import CacheSpec
from torch_pagoda.runtime.step_metadata import StepMetadata


class Function(nn.Module):
    """``function(self, *inputs)`` over named tensors, which become parameters."""

    def __init__(self, function: Callable[..., torch.Tensor], **parameters: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs)


def graph_of(
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    target: NpuTarget | None = None,
    dynamic: tuple[int, ...] = (1,),
    **parameters: torch.Tensor,
) -> TracedGraph:
    """The ATen graph of ``function`` with a target set."""
    graph = aten_of_module(Function(function, **parameters), *inputs, dynamic=dynamic)
    graph.npu = target or NpuTarget()
    return graph


def operators(graph: TracedGraph) -> list[str]:
    """Names of what the graph calls, in order, views and items left out."""
    views = ("view", "reshape", "transpose", "unsqueeze", "getitem", "slice", "permute", "_unsafe_view", "sym_size")
    names = [operator_name(n) for n in graph.graph.nodes if n.op == "call_function"]
    return [n for n in names if n.rpartition(".")[2] not in views]


def refusals(record: PassRecord) -> str:
    """All reasons why better routes were not taken, joined."""
    return "; ".join(f"{route}: {reason}" for r in record.routes for route, reason in r.refused)


def assert_legal(graph: TracedGraph) -> None:
    """Every ``npu::`` call keeps within the limits."""
    assert graph.npu is not None
    assert illegal_calls(graph, graph.npu) == []


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def lowered(lower, function, *inputs, target=None, prepare=remove_noops, **parameters):
    """The lowered graph and the record, with the numbers compared and what must hold of every lowering."""
    graph = graph_of(function, *inputs, target=target, **parameters)
    prepare(graph)
    expected = run_graph(graph.copy(), *inputs)
    varying = [is_dynamic(size) for size in shape(graph.output.args[0][0])]
    record = lower(graph)
    found = run_graph(graph, *inputs)
    assert found.dtype == expected.dtype
    assert [is_dynamic(size) for size in shape(graph.output.args[0][0])] == varying
    torch.testing.assert_close(found, expected, atol=TOLERANCE[found.dtype], rtol=TOLERANCE[found.dtype])
    assert_legal(graph)
    assert not [name for name in operators(graph) if name.startswith("pagoda.")]
    assert lower(graph).matches == 0
    return graph, record


class AttentionGraph:
    """A graph that is one ``pagoda::paged_attention`` of a flat step, and tensors to run it on."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        target: NpuTarget | None = None,
        dtype: torch.dtype = torch.bfloat16,
        sinks: bool = False,
        alibi: bool = False,
        sliding_window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
        calls: int = 1,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        value_dim = value_dim or dim
        self.shapes = {"q": (heads, dim), "k": (kv_heads, dim), "v": (kv_heads, value_dim)}
        self.dtype = dtype
        mode = FakeTensorMode(shape_env=ShapeEnv())
        module = fx.GraphModule(nn.Module(), fx.Graph())
        self.traced = traced = TracedGraph(module, mode, {}, input_ids="input_ids")

        def placeholder(name: str, example: torch.Tensor, dynamic: int | None) -> fx.Node:
            sizes = [DimDynamic.DUCK if i == dynamic else DimDynamic.STATIC for i in range(example.dim())]
            node = module.graph.placeholder(name)
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
            node.meta["example_value"] = mode.from_tensor(example, source=LocalSource(name), symbolic_context=context)
            return node

        placeholder("input_ids", torch.zeros(1, 29, dtype=torch.int64), 1)
        q, k, v = (
            placeholder(name, torch.empty(1, 29, h, d, dtype=dtype), 1) for name, (h, d) in self.shapes.items()
        )
        output = module.graph.output(())
        spec = CacheSpec(kv_heads, dim, value_dim, cache_dtype or dtype, sliding_window)
        key_cache, value_cache, *scales = traced.add_cache(spec)
        metadata = [traced.step_input(n) for n in ("slot_mapping", "block_table", "query_start_loc", "seq_lens")]
        generator = torch.Generator().manual_seed(1)
        self.sinks = torch.randn(heads, generator=generator).to(dtype) if sinks else None
        self.slopes = torch.rand(heads, generator=generator) if alibi else None
        extra = [
            None if tensor is None else traced.add_constant(name, tensor)
            for name, tensor in (("sinks", self.sinks), ("slopes", self.slopes))
        ]
        results = []
        with traced.graph.inserting_before(output):
            turned = [traced.call(torch.ops.aten.transpose.int, x, 1, 2) for x in (q, k, v)]
            for _ in range(calls):
                out = traced.call(
                    PAGED_ATTENTION,
                    *turned,
                    key_cache,
                    value_cache,
                    *metadata,
                    *extra,
                    dim**-0.5,
                    sliding_window,
                    chunk,
                    softcap,
                    *(scales or (None, None)),
                )
                results.append(traced.call(torch.ops.aten.transpose.int, out, 1, 2))
        output.args = (tuple(results),)
        traced.npu = target or NpuTarget()

    def run(
        self, steps: Sequence[Sequence[int]], blocks: int = 64, by: Callable[..., Any] | None = None
    ) -> list[torch.Tensor]:
        """Outputs of steps, each of which says how many tokens every sequence adds (0: it rests); ``by`` takes the
        place of the graph's module."""
        traced = self.traced
        traced.recompile()
        size = traced.npu.block_size if traced.caches[0].by_token else 16  # type: ignore[union-attr]
        caches = allocate_kv_cache(traced.caches, blocks, size)
        for pair in caches:
            for cache in pair:
                cache.fill_(float("nan") if cache.is_floating_point() else 77)
        generator = torch.Generator().manual_seed(0)
        width = 256 // size + 1
        count = len(steps[0])
        table = torch.randperm(blocks, generator=generator)[: width * count].view(count, width).int()
        done = [0] * count
        results = []
        for step in steps:
            active = [s for s, n in enumerate(step) if n]
            counts = torch.tensor([step[s] for s in active])
            positions = [torch.arange(done[s], done[s] + step[s]) for s in active]
            slots = torch.cat(
                [table[s].long()[p // size] * size + p % size for s, p in zip(active, positions, strict=True)]
            )
            for s in active:
                done[s] += step[s]
            lens = torch.tensor([done[s] for s in active], dtype=torch.int32)
            start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
            metadata = StepMetadata(slots, table[active], start, lens, torch.arange(len(slots)), slots)
            given: dict[str, Any] = {"input_ids": torch.zeros(1, len(slots), dtype=torch.int64), **traced.constants}
            for name, (heads, dim) in self.shapes.items():
                x = torch.randn(1, len(slots), heads, dim, generator=generator)
                given[name] = x.to(self.dtype)
            for i, (spec, entry) in enumerate(zip(traced.caches, caches, strict=True)):
                given |= {f"{part.name}_{i}": cache for part, cache in zip(spec.parts(), entry, strict=True)}
            values = [given[n.name] if n.name in given else metadata.field(n.name) for n in traced.placeholders]
            with torch.no_grad():
                results.append((by or traced.module)(*values)[-1])
        return results
