"""Bytes that the operators of a graph read and write, from the shapes of their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import cache_index, callee, step_field, value
from ...passes.graph.provenance import launches_work
from ...runtime.ops.linear.quantized_linear import quantized_linear
from ...runtime.ops.linear.quantized_weight import Quantization, packed_bytes
from ...runtime.ops.moe.quantized_moe import quantized_moe
from ...runtime.program import StateSpec, is_cache_input
from ...runtime.state_tables import CHUNK_TABLES

TOKENS = 128
"""Tokens of the step that is counted where none is given, all of one sequence."""

# They read the rows that they are asked for, not the whole table.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
_BLOCK_SIZE = 16
# Of each expert that a row is sent to, the matrix.
_GROUPED = frozenset({"npu_grouped_matmul", "npu_grouped_matmul_swiglu_quant_v2", "_grouped_mm"})
# What sorts rows by their experts, and what stands between it and the products.
_ROUTING, _OF_ROUTING = "npu_moe_init_routing_v2", frozenset({"getitem", "_to_copy"})


@dataclass(frozen=True)
class Step:
    """A step of one sequence.

    Attributes:
        tokens: that are computed.
        context: that the sequence has afterwards, these included.
        rows: of logits that are requested.
    """

    tokens: int = TOKENS
    context: int = TOKENS
    rows: int = TOKENS


@dataclass(frozen=True)
class Moved:
    """Bytes that operators move in one step.

    Attributes:
        weights: parameters and tables read.
        cache: keys and values read from the paged cache and written to it, and states.
        activations: everything else that is read or written.
    """

    weights: int = 0
    cache: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.activations

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.weights + other.weights, self.cache + other.cache, self.activations + other.activations)

    def __mul__(self, times: int) -> Moved:
        return Moved(times * self.weights, times * self.cache, times * self.activations)


@dataclass(frozen=True)
class Traffic:
    """Bytes that operators move.

    Attributes:
        per_token: activations read and written, keys and values in the cache included, per token of the step.
        weights: parameters and tables read, per step.
    """

    per_token: float
    weights: int


def traffic(traced: TracedGraph, nodes: Iterable[fx.Node], step: Step | None = None) -> Traffic:
    """Bytes that the operators among ``nodes`` move, as the tables show them; see ``moved``."""
    step = step or Step()
    found = moved(traced, nodes, step)
    return Traffic((found.activations + found.cache) / step.tokens, found.weights)


def moved(traced: TracedGraph, nodes: Iterable[fx.Node], step: Step) -> Moved:
    """Bytes that the operators among ``nodes`` read and write, each by itself, in one step.

    Nothing is taken to stay in a processor's cache between two operators; an input read twice by one operator counts
    once, and a broadcast tensor at the size that is stored. Of experts only those are read that a row can be sent to.
    """
    sizes = Sizes(traced, step)
    total = Moved()
    for node in nodes:
        if launches_work(node):
            total += _of_operator(traced, node, step, sizes)
    return total


def _of_operator(traced: TracedGraph, node: fx.Node, step: Step, sizes: Sizes) -> Moved:
    weights = cache = 0
    results = 0 if _returns_input(node) else sum(sizes.stored_bytes(v) for v in pytree.tree_leaves(value(node)))
    activations = results
    gathers = callee(node).partition(".")[0] in _GATHERS
    for read in node.all_input_nodes:
        source = _source(read)
        size = sizes.stored_bytes(value(read))
        if source.op == "placeholder" and is_cache_input(source.name):
            cache += min(size, results) if gathers else _cached_bytes(traced, node, source, step, sizes)
        elif is_weight(traced, source):
            if not _is_mask(node, read):
                size = _rounded_bytes(node, read) or size
                weights += min(size, results) if gathers else _read_of_experts(node, read, size, sizes)
        else:
            activations += size
    return Moved(weights, cache, activations)


def _returns_input(node: fx.Node) -> bool:
    """True if an operator returns an input that it has written to."""
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return any(result.alias_info is not None and result.alias_info.is_write for result in returns)


def is_weight(traced: TracedGraph, node: fx.Node) -> bool:
    """True if a node is, or is a view of, a parameter or a constant of the graph."""
    placeholder = _source(node)
    # Merged weights become constants when the graph is linked.
    return placeholder.name in traced.constants or placeholder.name in traced.notes.made_when_linked


def _is_mask(node: fx.Node, read: fx.Node) -> bool:
    """True if ``read`` is a constant mask of which a kernel looks at the tiles on the diagonal only."""
    return node.kwargs.get("atten_mask") is read


def _rounded_bytes(node: fx.Node, read: fx.Node) -> int:
    """Bytes of a weight that is rounded when the graph is linked; 0 if it is not."""
    arguments: tuple[Any, ...] = node.args
    if node.target is quantized_moe and read in arguments[3:5]:
        experts, *sizes = map(int, value(read).shape)
        outputs, inputs = reversed(sizes) if arguments[11] else sizes
        scheme = Quantization.of_numbers(arguments[15 if read is arguments[3] else 16])
        return experts * packed_bytes(outputs, inputs, scheme)
    if node.target is not quantized_linear or read is not node.args[1]:
        return 0
    outputs, inputs = value(read).shape
    scheme = Quantization(*arguments[4:8], *arguments[9:10])
    return packed_bytes(int(outputs), int(inputs), scheme)


def _read_of_experts(node: fx.Node, read: fx.Node, size: int, sizes: Sizes) -> int:
    """Bytes that are read of a weight of ``size``."""
    if callee(node).partition(".")[0] not in _GROUPED or value(read).dim() < 3:
        return size
    experts = int(value(read).shape[0])
    return size * min(experts, rows_of_experts(node, sizes)) // experts


def rows_of_experts(node: fx.Node, sizes: Sizes) -> int:
    """The number of rows that a product of experts multiplies: where ranks hold experts of their own, at the best
    spread."""
    count = sizes.shape(pytree.tree_leaves(node.args[0])[0])[0]
    source: Any
    for source in node.all_input_nodes:
        while callee(source) in _OF_ROUTING:
            source = source.args[0]
        if callee(source) == _ROUTING:
            first, end = map(int, source.kwargs["active_expert_range"])
            return -(-count * (end - first) // int(source.kwargs["expert_num"]))
    return count


def _cached_bytes(traced: TracedGraph, node: fx.Node, cache: fx.Node, step: Step, sizes: Sizes) -> int:
    """Bytes of the rows of a cache, or of a sequence's state, that an operator reads and writes."""
    row = value(cache)
    index = cache_index(cache)
    spec = None if index is None else traced.caches[index]
    if isinstance(spec, StateSpec):
        # An operator of ours reads and writes; of those that it is lowered to, one does the one, another the other.
        own = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "pagoda"
        return (2 if own else 1) * sizes.bytes(row.shape[1:], row.dtype)
    window = 0 if spec is None else spec.sliding_window
    seen = min(step.context, window + step.tokens - 1) if window else step.context
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace != "pagoda":
        rows = step.tokens if target._schema.is_mutable else seen
    else:
        rows = step.tokens + seen
    by_head = spec is not None and spec.scales_by_head and row.dim() == 3
    return rows * sizes.bytes(row.shape[1:2] if by_head else row.shape[2:], row.dtype)


def _source(node: fx.Node) -> fx.Node:
    """The node that ``node`` is a view of."""
    while node.op == "call_function" and not launches_work(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _chunk_sizes(table: str, most: int, tokens: int) -> tuple[int, ...]:
    """Sizes of a table of ``state_tables.chunk_tables`` for a step of one sequence."""
    width = min(most, tokens)
    chunks = -(-tokens // width)
    sizes = {"chunk_tokens": (chunks, width), "last_chunks": (1,), "chunk_rows": (tokens,)}
    return sizes.get(table, (max(1, chunks - 1),) if table.startswith("link_") else (chunks,))


class Sizes:
    """Numbers for the symbolic sizes of a graph in one step. Any other size counts as its tokens.

    Args:
        traced: the graph.
        step: the step.
    """

    def __init__(self, traced: TracedGraph, step: Step) -> None:
        block = traced.npu.block_size if traced.npu is not None else _BLOCK_SIZE
        blocks = -(-step.context // block)
        known: Mapping[str, tuple[int, ...]] = {
            "block_table": (1, blocks),
            "query_start_loc": (2,),
            "seq_lens": (1,),
            "logits_rows": (step.rows,),
            "padded_tokens": (1, step.tokens),
            "kept_rows": (1,),
            "state_read": (1,),
            "state_write": (1,),
        }
        self._tokens = step.tokens
        self._numbers: dict[sympy.Symbol, int] = {}
        for node in traced.placeholders:
            tensor = value(node)
            numbers = (blocks,) if is_cache_input(node.name) else known.get(step_field(node), ())
            if step_field(node) == "padded_tokens" and node.name[-1].isdigit():  # a least length follows the name
                numbers = 1, max(step.tokens, int(node.name.rpartition("_")[2]))
            if step_field(node) in CHUNK_TABLES:
                numbers = _chunk_sizes(step_field(node), int(node.name.rpartition("_")[2]), step.tokens)
            if isinstance(tensor, torch.Tensor):
                for size, number in zip(tensor.shape, numbers, strict=False):
                    if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                        self._numbers.setdefault(size.node.expr, number)
        if traced.token_symbol is not None:
            self._numbers[traced.token_symbol] = step.tokens

    def number(self, size: Any) -> int:
        """A size as a number."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        return int(expression.subs({s: self._numbers.get(s, self._tokens) for s in expression.free_symbols}))

    def shape(self, node: Any) -> tuple[int, ...]:
        """The sizes of a node's tensor as numbers; () when it is none."""
        tensor = value(node)
        return tuple(self.number(size) for size in tensor.shape) if isinstance(tensor, torch.Tensor) else ()

    def bytes(self, shape: Iterable[Any], dtype: torch.dtype) -> int:
        """Bytes of a dense tensor."""
        count = dtype.itemsize
        for size in shape:
            count *= self.number(size)
        return count

    def stored_bytes(self, v: Any) -> int:
        """Bytes of what a tensor refers to; 0 for anything else."""
        if not isinstance(v, torch.Tensor):
            return 0
        strides = v.stride() if v.layout == torch.strided else (1,) * v.dim()
        kept = [
            size for size, stride in zip(v.shape, strides, strict=True) if not (type(stride) is int and stride == 0)
        ]
        return self.bytes(kept, v.dtype)
