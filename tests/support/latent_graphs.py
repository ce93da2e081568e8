"""Graphs of one latent attention, in the spellings of models, to be lowered for an NPU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.attention_node import PAGED_ATTENTION
from torch_pagoda.passes.graph.fx_nodes import shape
from torch_pagoda.passes.rewrite.merge_linears import merge_linears
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.attention.lightning_indexer import lightning_indexer
from torch_pagoda.runtime.program import CacheSpec

from npu_graphs import AttentionGraph

aten, pagoda = torch.ops.aten, torch.ops.pagoda
AS_BFLOAT16 = NpuTarget(block_size=16, float32_as=torch.bfloat16)
HIDDEN, COMPRESSED, LATENT_DIM, CONTENT, ROTARY, VALUE = 1024, 1536, 512, 128, 64, 128
INDEX_HEADS, INDEX_DIM = 8, 128


class LatentGraph(AttentionGraph):
    """A flat step of one latent attention, from the hidden states to its result.

    Args:
        heads: of queries and keys.
        latent, content, rotary, hidden: dims.
        spelling: how keys are put together: "copies", "cat", "tokens first" or "half written".
        mode: of the rotations.
        query: "compressed" or "plain" (one product of the hidden states); "whole" (a rotation of some dims of whole
            heads) or "parts" (joined behind the rotation).
        dtype, target: of the graph.
        merged: products that read one tensor are merged.
        calls: attentions over the same keys.
        topk: keys that an indexer with a cache of its own chooses; 0: all are attended.
        change: gets the builder before the keys are put together and may replace its parts.
        options: of the attention.
    """

    def __init__(
        self,
        *,
        heads: int = 2,
        latent: int = LATENT_DIM,
        content: int = CONTENT,
        rotary: int = ROTARY,
        hidden: int = HIDDEN,
        spelling: str = "copies",
        mode: str = "interleaved_to_half",
        query: str = "compressed whole",
        dtype: torch.dtype = torch.float32,
        target: NpuTarget = AS_BFLOAT16,
        merged: bool = True,
        calls: int = 1,
        topk: int = 0,
        change: Callable[[LatentGraph], None] | None = None,
        **options: Any,
    ) -> None:
        self.heads, self.content, self.rotary, self.dtype = heads, content, rotary, dtype
        self.shapes = {"hidden": (1, hidden), "cos": (1, rotary), "sin": (1, rotary)}
        self.generator = torch.Generator().manual_seed(2)
        module = fx.GraphModule(nn.Module(), fx.Graph())
        self.traced = traced = TracedGraph(module, FakeTensorMode(shape_env=ShapeEnv()), {}, input_ids="input_ids")
        self._input("input_ids", torch.zeros(1, 29, dtype=torch.int64))
        x, cos, sin = (self._input(n, torch.empty(1, 29, *size, dtype=dtype)) for n, size in self.shapes.items())
        output = module.graph.output(())
        sliding_window = options.get("sliding_window", 0)
        spec = CacheSpec(heads, content + rotary, VALUE, options.get("cache_dtype", dtype), sliding_window)
        key_cache, value_cache, *scales = self.caches = traced.add_cache(spec)
        scales = scales or [None, None]
        metadata = [traced.step_input(n) for n in ("slot_mapping", "block_table", "query_start_loc", "seq_lens")]
        with traced.graph.inserting_before(output):
            self.hidden, self.cos, self.sin = (traced.call(aten.squeeze.dim, node, 2) for node in (x, cos, sin))
            self.mode, self.spelling = mode, spelling
            rows = self.linear("down_keys", self.hidden, latent + rotary)
            self.latent = self.norm("keys_norm", self.cut(rows, 0, latent))
            self.before = self.heads_first(self.cut(rows, latent, latent + rotary), 1)
            self.query = self._query("compressed" in query, "whole" in query)
            self.shared = self.rotated(self.before)
            self.both = self.linear("up_keys", self.latent, heads * (content + VALUE))
            per_head = self.heads_first(self.both, heads)
            self.key, self.value = self.cut(per_head, 0, content), self.cut(per_head, content, content + VALUE)
            if change is not None:
                change(self)
            whole = self.joined(self.key, self.expanded(self.shared))
            extra = [traced.add_constant(n, options[n]) if n in options else None for n in ("sinks", "slopes")]
            numbers = options.get("chunk", 0), options.get("softcap", 0.0)
            selected = self._selected(topk, metadata) if topk else None
            results = []
            for _ in range(calls):
                out = traced.call(
                    PAGED_ATTENTION,
                    *(self.query, whole, self.value, key_cache, value_cache, *metadata, *extra),
                    *(0.1, sliding_window, *numbers, *scales, *([selected] if topk else [])),
                )
                results.append(traced.call(aten.transpose.int, out, 1, 2))
        output.args = (tuple(results),)
        if merged:
            merge_linears(traced)
        traced.npu = target

    def _input(self, name: str, example: torch.Tensor) -> fx.Node:
        sizes = [DimDynamic.DUCK if i == 1 else DimDynamic.STATIC for i in range(example.dim())]
        node = self.traced.graph.placeholder(name)
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        fake = self.traced.fake_mode.from_tensor(example, source=LocalSource(name), symbolic_context=context)
        node.meta["example_value"] = fake
        return node

    def linear(self, name: str, x: fx.Node, features: int, bias: bool = False) -> fx.Node:
        """A product with a new weight of that name; the module is named after what it reads, as merging asks."""
        size = int(shape(x)[-1])
        weight = torch.randn(features, size, generator=self.generator) / size**0.5
        arguments = [self.traced.add_constant(name, weight.to(self.dtype))]
        if bias:
            arguments.append(self.traced.add_constant(f"{name}_bias", weight[:, 0].to(self.dtype).clone()))
        node = self.traced.call(aten.linear.default, x, *arguments)
        node.meta["nn_module_stack"] = {name: (f"attention.{name}", nn.Linear)}
        return node

    def norm(self, name: str, x: fx.Node, offset: float = 0.0) -> fx.Node:
        gamma = 1 + torch.randn(int(shape(x)[-1]), generator=self.generator) / 8
        weight = self.traced.add_constant(name, gamma.to(self.dtype))
        return self.traced.call(pagoda.rms_norm.default, x, weight, 1e-6, offset, False)

    def cut(self, x: fx.Node, start: int, end: int) -> fx.Node:
        return self.traced.call(aten.slice.Tensor, x, -1, start, end)

    def heads_first(self, x: fx.Node, heads: int) -> fx.Node:
        """``[1, T, H * D]`` as ``[1, H, T, D]``."""
        rows = self.traced.call(aten.reshape.default, x, [1, -1, heads, int(shape(x)[-1]) // heads])
        return self.traced.call(aten.transpose.int, rows, 1, 2)

    def rotated(self, x: fx.Node, start: int = 0) -> fx.Node:
        whole = self.traced.call(pagoda.rope.default, [x], self.cos, self.sin, self.mode, start, False)
        return self.traced.call(operator.getitem, whole, 0)

    def _selected(self, topk: int, metadata: list[fx.Node]) -> fx.Node:
        """What an indexer chooses whose queries are made from what the attention's are made from."""
        (cache,) = self.traced.add_cache(CacheSpec(1, INDEX_DIM, 0, self.dtype))
        rows = self.linear("index_queries", self.source, INDEX_HEADS * INDEX_DIM)
        query = self.traced.call(aten.reshape.default, rows, [1, -1, INDEX_HEADS, INDEX_DIM])
        weights = self.linear("index_weights", self.hidden, INDEX_HEADS)
        weights = self.traced.call(aten.mul.Tensor, weights, 0.25)
        given = query, self.linear("index_keys", self.hidden, INDEX_DIM), weights, topk, INDEX_DIM**-0.5
        return self.traced.call(lightning_indexer, *given, cache, *metadata)

    def _query(self, compressed: bool, whole: bool) -> fx.Node:
        source = self.hidden
        if compressed:
            source = self.norm("query_norm", self.linear("down_queries", self.hidden, COMPRESSED))
        self.source = source
        dim = self.content + self.rotary
        rows = self.heads_first(self.linear("up_queries", source, self.heads * dim), self.heads)
        if whole:
            return self.rotated(rows, self.content)
        parts = self.cut(rows, 0, self.content), self.rotated(self.cut(rows, self.content, dim))
        return self.traced.call(aten.cat.default, list(parts), -1)

    def expanded(self, shared: fx.Node) -> fx.Node:
        return self.traced.call(aten.expand.default, shared, [-1, self.heads, -1, -1])

    def joined(self, content: fx.Node, shared: fx.Node) -> fx.Node:
        call = self.traced.call
        if self.spelling == "cat":
            return call(aten.cat.default, [content, shared], -1)
        if self.spelling == "tokens first":
            turned = [call(aten.transpose.int, x, 1, 2) for x in (content, shared)]
            return call(aten.transpose.int, call(aten.cat.default, turned, -1), 1, 2)
        tokens = call(aten.sym_size.int, content, 2)
        end, whole = self.content, self.content + self.rotary
        node = call(aten.new_empty.default, content, [1, self.heads, tokens, whole], pin_memory=False)
        if self.spelling == "half written":
            content, end = self.cut(content, 0, end // 2), end // 2
        for x, start, stop in ((content, 0, end), (shared, self.content, whole)):
            place = call(aten.slice.Tensor, node, 3, start, stop)
            node = call(aten.slice_scatter.default, node, call(aten.copy.default, place, x), 3, start, stop)
        return node
