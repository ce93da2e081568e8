"""The operators of one decoder layer as a graph to draw: boxes and arrows, without views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..passes import TracedGraph
from ..passes.graph.fx_nodes import module_path, value
from ..passes.graph.provenance import DecoderLayers, launches_work, operator_name, scopes, source_line
from .regions import region

_SHORT_DTYPE = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Box:
    """An operator, or an input or output of the layer.

    Attributes:
        title: name of the operator or the input.
        subtitle: dtype and shape of the result.
        kind: region of the operator ("" for the rest), "input" or "output".
        details: lines for a tooltip: module, source line, weights.
    """

    title: str
    subtitle: str
    kind: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerGraph:
    """Boxes, and arrows as pairs of their indices."""

    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int], ...]


def layer_graph(traced: TracedGraph, layers: DecoderLayers, index: int) -> LayerGraph:
    """The operators of layer ``index`` of a graph.

    Parameters and step metadata are left out; they would add three arrows to every box.
    """
    inside = [n for n in layers.nodes(index) if launches_work(n)]
    boxes: list[Box] = []
    numbers: dict[fx.Node, int] = {}
    arrows: dict[tuple[int, int], None] = {}
    for node in inside:
        reads = []
        for source in _sources(node):
            if source in numbers:
                reads.append(numbers[source])
            elif (outer := _outer(traced, layers, source)) is not None:
                numbers[source] = len(boxes)
                reads.append(len(boxes))
                boxes.append(outer)
        numbers[node] = len(boxes)
        arrows |= {(read, len(boxes)): None for read in reads}
        boxes.append(_box(traced, node))
    members = set(layers.nodes(index))
    for node in inside:
        if any(user not in members for user in _readers(node)):
            arrows[numbers[node], len(boxes)] = None
            boxes.append(Box("out", _shape(traced, node), "output"))
    return LayerGraph(tuple(boxes), tuple(arrows))


def _box(traced: TracedGraph, node: fx.Node) -> Box:
    stack = scopes(node)
    details = [f"{module_path(node)} ({stack[-1].kind})" if stack else "", source_line(node)]
    for source in _sources(node):
        if source.name in traced.constants:
            details.append(f"reads {source.name} {_shape(traced, source)}")
    return Box(operator_name(node), _shape(traced, node), region(node), tuple(d for d in details if d))


def _outer(traced: TracedGraph, layers: DecoderLayers, source: fx.Node) -> Box | None:
    """The box of an input of the layer; None for weights and step metadata."""
    if source.op != "placeholder":
        if source.op != "call_function" or not launches_work(source):
            return None
        layer = layers.of.get(source, -1)
        where = layers.paths[layer] if layer >= 0 else module_path(source)
        name = operator_name(source)
        tail = where.rpartition(".")[2]
        title = f"{tail} {name.rpartition('.')[2]}".strip() if layer < 0 else f"layer {layer}"
        return Box(title, _shape(traced, source), "input", (name, f"from {where}" if where else ""))
    if source.name in traced.constants or source.name in traced.step_inputs:
        return None
    if not isinstance(value(source), torch.Tensor):
        return None
    return Box(source.name, _shape(traced, source), "input", ("input of the graph",))


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose elements ``node`` reads, through views."""
    found: dict[fx.Node, None] = {}
    for n in node.all_input_nodes:
        while n.op == "call_function" and not launches_work(n) and n.all_input_nodes:
            n = n.all_input_nodes[0]
        if any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value(n))):
            found[n] = None
    return list(found)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the elements of ``node``, through views."""
    found, pending = [], list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "output" or launches_work(user):
            found.append(user)
        else:
            pending.extend(user.users)
    return found


def _shape(traced: TracedGraph, node: fx.Node) -> str:
    tensors = [t for t in pytree.tree_leaves(value(node)) if isinstance(t, torch.Tensor)]
    if not tensors:
        return ""
    dtype = _SHORT_DTYPE.get(tensors[0].dtype, str(tensors[0].dtype).removeprefix("torch."))
    shapes = dict.fromkeys(" × ".join(_size(traced, s) for s in t.shape) for t in tensors)
    return f"{dtype} {', '.join(shapes)}"


def _size(traced: TracedGraph, size: Any) -> str:
    """A number as text; in terms of "T" if it depends on the number of tokens, "N" for other sizes of a step."""
    if isinstance(size, int):
        return str(size)
    expression = size.node.expr
    if expression.free_symbols == {traced.token_symbol}:
        return str(expression.subs(traced.token_symbol, sympy.Symbol("T"))).replace("*", "·")
    return "N"
