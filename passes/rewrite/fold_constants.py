"""Compute once what depends on parameters, buffers and literals alone; literal tensors become graph inputs, or
numbers.

Matches:
    y = f(W, ...)                          # f without side effects and without randomness, the size of y known
    x * f(2, ...)                          # f of literals alone, without dims; x of floats, with dims
Becomes:
    y                                      # a graph input that always receives f(W, ...)
    x * 1.41                               # likewise +, - and /, as the second operand
Why it is faster:
    some models compute with their weights at every step: softplus of a gate, tables repeated for each layer. A device
    has no copy to make of a number, and no float64 to read.

Level 1: bitwise equal, numbers on a CPU. A program does not see later in-place changes of such weights;
``WeightGuard`` raises then.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from ..graph.evaluate import Evaluation, TooLarge
from ..graph.fx_nodes import (
    is_dynamic,
    is_pure,
    is_tensor,
    mutated_arguments,
    shape,
    storage_key,
    value,
)
from ..graph.provenance import launches_work
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph

_MOST_BYTES = 16 << 20
"""Larger constants cost more memory than they are worth. A router's weight in float32 is smaller: that of 384 experts
of 7168 inputs takes 11 MB, and making it anew in every step would move 17 MB."""
_TAKING_NUMBERS = frozenset(getattr(torch.ops.aten, name).Tensor for name in ("add", "div", "mul", "sub"))


def fold_constants(traced: TracedGraph) -> PassRecord:
    """Replace computed constants. ``traced.notes.folded`` names the inputs that they were computed from.

    Flat (paged) graphs only: elsewhere the caller owns the weights. What is computed from a rank's part of a weight
    is folded for NPUs alone, where each rank lowers a graph of its own.
    """
    evaluation = Evaluation(traced, {})

    def step(node: fx.Node) -> str | None:
        tensor = value(node)
        if tensor.numel() * tensor.element_size() > _MOST_BYTES:
            return f"a constant {tuple(tensor.shape)} would stay in memory"
        sources = evaluation.sources(node)
        if not traced.notes.of_layers.isdisjoint(sources):
            return "all layers are to stay alike, and one of them is not there"
        if traced.npu is None and not traced.notes.parts.keys().isdisjoint(sources):
            return "all ranks take one graph, and each has a part of its own"
        if any(traced.constants[source].is_meta for source in sources):
            return "its weight is not loaded"
        try:
            with torch.no_grad():
                folded = evaluation(node)
        except TooLarge as reason:
            return str(reason)
        if (folded.dtype, folded.shape, folded.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
            return "its layout is not the traced one"
        if not sources:  # what comes of weights is an input, which a guard watches
            _put_number(node, folded)
        if node.users:
            node.replace_all_uses_with(traced.add_constant(_unused_name(traced), folded))
            traced.notes.made_of[id(folded)] = folded, tuple(sources)
        traced.notes.fold(sources)
        return ""

    return rewrite_each(traced, "fold_constants", step, _results(_constants(traced)) if traced.paged else ())


def _put_number(node: fx.Node, folded: torch.Tensor) -> None:
    """Put a number in place of a tensor without dims where it is the second operand of a product or a sum with floats
    that have dims: the result has their dtype, and the same bits on a CPU, either way."""
    if folded.dim() or folded.dtype is torch.bool or folded.is_complex():
        return
    for user in list(node.users):
        if user.target not in _TAKING_NUMBERS or user.args[1] is not node:
            continue
        other = value(user.args[0])
        if is_tensor(user.args[0]) and other.dim() and other.is_floating_point():
            user.args = (user.args[0], folded.item(), *user.args[2:])


def _constants(traced: TracedGraph) -> set[fx.Node]:
    """Parameters, buffers, literals and what is computed from them, the same at every step."""
    written = {storage_key(n) for node in traced.graph.nodes for n in mutated_arguments(node)}
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if storage_key(node) in written:
            continue
        if node.op == "placeholder":
            same = node.name in traced.constants
        elif node.op == "get_attr":
            same = is_tensor(node)
        else:
            same = (
                node.op == "call_function"
                and is_pure(node.target)
                and is_tensor(node)
                and not any(is_dynamic(size) for size in shape(node))
                and all(n in found for n in node.all_input_nodes)
            )
        if same:
            found.add(node)
    return found


def _results(constants: set[fx.Node]) -> list[fx.Node]:
    """Literals and those that take work, where something else reads them, as they are or through views."""
    results: set[fx.Node] = set()
    for node in constants:
        if any(user not in constants for user in node.users):
            while node.op == "call_function" and not launches_work(node) and node.all_input_nodes:
                node = node.all_input_nodes[0]
            if launches_work(node) or node.op == "get_attr":
                results.add(node)
    return sorted(results)


def _unused_name(traced: TracedGraph) -> str:
    taken = {node.name for node in traced.placeholders}
    return next(name for i in itertools.count() if (name := f"folded_{i}") not in taken)
