"""Calls of a lowered graph's attention at the size of the model's windows.

The steps for a whole model are shorter than its windows; attention by itself is cheap. It gets the step's real
metadata, and random queries and caches, except for the keys at the edges of the windows: queries attend to these more
than to all others together, so that a key too few or too many changes the result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import cache_index, callee, closure, shape, value
from ...runtime.ops.attention.int8_rows import quantize_rows
from ...runtime.step_metadata import StepMetadata
from ...runtime.window_blocks import WINDOW_LENS
from .operator_check import OperatorCall, innermost_module

Shares: TypeAlias = Sequence[tuple[int, int]]
"""(tokens before the step, tokens in it) of each sequence."""

_KERNELS = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")
_BAND = 4
_ATTENTION = 2.0
"""Log-ratio of a query's attention to an edge key and to all others together."""


def window_calls(traced: TracedGraph, decode: TracedGraph | None = None) -> Iterator[tuple[OperatorCall, int]]:
    """One call per window and kind of step, with the number of equal ones in the graph.

    Args:
        traced: a lowered graph with its weights.
        decode: the graph of one-token steps, if there is a separate one.
    """
    longest = traced.max_positions or 1 << 30
    for graph, kinds in ((traced, ("prompts", "decode")[: 1 + (decode is None)]), (decode, ("decode",))):
        if graph is None:
            continue
        nodes = [node for node in graph.graph.nodes if window_of(node)]
        counts = Counter(map(_signature, nodes))
        for node in {_signature(node): node for node in reversed(nodes)}.values():
            window = window_of(node)
            for kind in kinds:
                shares = _shares(kind, window, longest)
                if shares:
                    yield _Call(graph, node, window, shares).made(kind), counts[_signature(node)]


def window_of(node: fx.Node) -> int:
    """Window of an attention call in tokens, the query's own included; 0: no window, and for other nodes."""
    if node.op != "call_function" or callee(node) not in _KERNELS:
        return 0
    if node.kwargs.get("sparse_mode") == _BAND:
        return int(node.kwargs["pre_tokens"]) + 1  # type: ignore[arg-type]
    lens = node.kwargs.get("actual_seq_lengths_kv")
    name = lens.name if isinstance(lens, fx.Node) else ""
    return int(name.rpartition("_")[2]) if name.startswith(WINDOW_LENS) else 0


def _signature(node: fx.Node) -> tuple[Any, ...]:
    """Signature of calls that differ in their layer only."""
    dims = [tuple(size for size in shape(given) if isinstance(size, int)) for given in node.args]
    return callee(node), window_of(node), plain_arguments(node.kwargs), tuple(dims)


def plain_arguments(kwargs: Mapping[str, Any]) -> tuple[tuple[str, int | float | str], ...]:
    """Names and values of a call's number and string arguments."""
    return tuple((name, given) for name, given in kwargs.items() if isinstance(given, int | float | str))


def _shares(kind: str, window: int, longest: int) -> Shares:
    """Sequences past the window, passing it in the step, reaching it, and shorter; empty if no sequence can exceed
    the window."""
    if window >= longest:
        return []
    if kind == "decode":
        return [(min(before, longest - 1), 1) for before in (window + 77, window, window - 1, window // 2)]
    wanted = (window + 50, 33), (window - 17, 40), (0, 9), (window + 200, 1)
    return [(max(0, min(before, longest - tokens)), tokens) for before, tokens in wanted]


class _Call:
    """A call of a graph in a step of its own.

    Args:
        traced: the graph.
        node: the call's node.
        window: its window.
        shares: the sequences.
    """

    def __init__(self, traced: TracedGraph, node: fx.Node, window: int, shares: Shares) -> None:
        assert traced.npu is not None
        self._traced, self._node, self._window, self._shares = traced, node, window, shares
        self._generator = torch.Generator().manual_seed(0)
        self._values: dict[fx.Node, Any] = {}
        self._tokens = sum(tokens for _, tokens in shares)
        size = traced.npu.block_size
        width = max(-(-(before + tokens) // size) for before, tokens in shares)
        count = len(shares)
        self._blocks = width * count
        self._table = torch.arange(self._blocks, dtype=torch.int32).view(width, count).t().flip(1).contiguous()
        self._step = self._metadata(size)
        read = closure(node.args[1])  # type: ignore[arg-type]
        (self._key_cache,) = (n for n in read if n.op == "placeholder" and n.name.startswith("key_cache"))
        self._dims = int(shape(self._key_cache)[-1])
        scale = float(node.kwargs.get("scale", node.kwargs.get("softmax_scale", 1.0)))  # type: ignore[arg-type]
        # Scores of what is drawn have a variance of 1; those at edges are larger by the logarithm of the window.
        self._spread = (self._dims * scale**2) ** -0.25
        self._edge = math.sqrt((math.log(window) + _ATTENTION) / (self._dims * scale))
        self._direction = self._drawn(self._dims).sign()
        self._activations = self._depending_on_tokens()

    def made(self, kind: str) -> OperatorCall:
        """The call with its correct results."""
        node = self._node
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        with torch.inference_mode():
            expected = node.target(*args, **kwargs)[0]  # type: ignore[operator]
        step = f"{kind} of {len(self._shares)} around a window of {self._window}"
        return OperatorCall(node.target, args, kwargs, {0: expected}, {}, step, innermost_module(node))

    def _metadata(self, size: int) -> StepMetadata:
        lengths = torch.tensor([tokens for _, tokens in self._shares])
        ends = lengths.cumsum(0)
        at = [torch.arange(before, before + tokens) for before, tokens in self._shares]
        slots = [row[where // size].long() * size + where % size for row, where in zip(self._table, at, strict=True)]
        return StepMetadata(
            slot_mapping=torch.cat(slots),
            block_table=self._table,
            query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32),
            seq_lens=torch.tensor([before + tokens for before, tokens in self._shares], dtype=torch.int32),
            logits_rows=ends - 1,
            token_lengths=torch.cat(at) + 1,
        )

    def _depending_on_tokens(self) -> set[fx.Node]:
        """Nodes that depend on the tokens of a step, not only on their number."""
        names = (self._traced.input_ids, self._traced.position_ids)
        found = {node for node in self._traced.placeholders if node.name in names}
        for node in self._traced.graph.nodes:
            if not isinstance(value(node), torch.SymInt | int) and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _value(self, node: fx.Node) -> Any:
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._input(node)
        if node in self._activations and node.target is not torch.ops.aten.index.Tensor:
            return self._queries(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _input(self, node: fx.Node) -> Any:
        if node.name in self._traced.step_inputs:
            return self._step.field(node.name)
        if node.name in self._traced.constants:
            return self._traced.constants[node.name]
        if node.name in (self._traced.input_ids, self._traced.position_ids):
            return torch.zeros(1, self._tokens, dtype=torch.int64)
        return self._tokens if cache_index(node) is None else self._cache(node)

    def _queries(self, node: fx.Node) -> torch.Tensor:
        """``[T, ...]`` with rows of whole heads."""
        sizes = [size if isinstance(size, int) else self._tokens for size in shape(node)]
        drawn = self._drawn(*sizes) * self._spread
        if sizes[-1] % self._dims == 0:  # or the part beside the latent
            drawn.view(-1, self._dims).add_(self._direction * self._edge)
        return drawn.to(value(node).dtype)

    def _cache(self, node: fx.Node) -> torch.Tensor:
        """The cache of keys, of values or of their scales."""
        kind, _, number = node.name.rpartition("_")
        part = "key" if kind.startswith("key") else "value"
        rows = self._rows(self._traced.placeholder(f"{part}_cache_{number}"))
        like = value(node)
        if value(self._traced.placeholder(f"{part}_cache_{number}")).dtype is not torch.int8:
            return rows.to(like.dtype)
        stored, scale = quantize_rows(rows)
        if not kind.endswith("scale"):
            return stored
        return scale.transpose(1, 2).contiguous() if like.shape[1] == rows.shape[2] else scale

    def _rows(self, node: fx.Node) -> torch.Tensor:
        """``[blocks, tokens, heads, dims]`` of numbers, the same at each call."""
        is_key = node is self._key_cache
        size, heads, dims = (int(part) for part in shape(node)[1:])
        generator = torch.Generator().manual_seed(1 + is_key)
        rows = torch.randn(self._blocks, size, heads, dims, generator=generator)
        if is_key:
            rows *= self._spread
            for (before, tokens), table in zip(self._shares, self._table, strict=True):
                edges = torch.arange(max(0, before - self._window), max(0, before + tokens - self._window + 1))
                rows[table[edges // size].long(), edges % size] += self._direction * self._edge
        return rows

    def _drawn(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self._generator)
