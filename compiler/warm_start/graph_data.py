"""A graph as plain data, and back: what its nodes call, on what, under which names. Fake values are not kept."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_NAMESPACES = ("aten", "pagoda", "npu", "prims")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, "getitem add sub mul floordiv mod truediv pow neg and_ or_ not_ eq ne lt le gt ge"),
        (math, "ceil floor trunc"),
        (torch, "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum"),
    )
    for name in names.split()
}
"""Arithmetic on the number of tokens, and the items of operators with several results."""
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_CPU = torch.device("cpu")
_LITERALS = (bool, int, float, str, type(None), torch.dtype, torch.layout)


class CannotStore(Exception):
    """The graph holds something that has no plain form. The message says what."""


def to_data(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Nodes as ``(op, name, target, args, kwargs)``, in order.

    Raises:
        CannotStore: a node is not made of operators, arithmetic, names and literals.
    """
    rows = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise CannotStore(f"{node.name} is a {node.op} node")
        if node.op == "placeholder" and (node.target != node.name or node.args):
            raise CannotStore(f"graph input {node.name} has another name or a default")
        target = _function_name(node.target) if node.op == "call_function" else str(node.target)
        kwargs = {key: _plain(x, node) for key, x in node.kwargs.items()}
        rows.append((node.op, node.name, target, _plain(node.args, node), kwargs))
    return rows


def from_data(rows: list[tuple[Any, ...]]) -> fx.GraphModule:
    """The graph of ``to_data`` as a module.

    Raises:
        ValueError: it calls what there is not.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs in rows:
        called = _function(target) if op == "call_function" else target
        named = {key: _value(x, nodes) for key, x in kwargs.items()}
        nodes[name] = graph.create_node(op, called, _value(args, nodes), named, name=name)
    return fx.GraphModule(torch.nn.Module(), graph)


def _plain(item: Any, node: fx.Node) -> Any:
    """Literals stand for themselves; all else is a tuple whose first item says what it is."""
    if isinstance(item, fx.Node):
        return ("node", item.name)
    if type(item) in _LITERALS or (isinstance(item, torch.device) and item == _CPU):
        return item
    if isinstance(item, (list, tuple)):
        return ("list" if isinstance(item, list) else "tuple", *(_plain(x, node) for x in item))
    if isinstance(item, torch.memory_format):
        return ("memory format", str(item).removeprefix("torch."))
    if isinstance(item, slice):
        return ("slice", *(_plain(x, node) for x in (item.start, item.stop, item.step)))
    raise CannotStore(f"{node.name} has an argument of type {type(item).__name__}")


def _value(item: Any, nodes: dict[str, fx.Node]) -> Any:
    if not isinstance(item, tuple):
        return item
    kind, *rest = item
    if kind in ("node", "memory format"):
        return nodes[rest[0]] if kind == "node" else getattr(torch, rest[0])
    inner = [_value(x, nodes) for x in rest]
    return inner if kind == "list" else tuple(inner) if kind == "tuple" else slice(*inner)


def _function_name(target: Any) -> str:
    name = f"operator {target}" if isinstance(target, torch._ops.OpOverload) else _NAMES.get(target, "")
    try:
        if name and _function(name) is target:
            return name
    except ValueError as error:
        raise CannotStore(str(error)) from error
    raise CannotStore(f"it calls {target!r}, which is not among the functions that can be stored")


def _function(name: str) -> Callable[..., Any]:
    """The function of a name.

    Raises:
        ValueError: there is none.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    parts = name.removeprefix("operator ").split(".")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None) if parts[0] in _NAMESPACES else None
    found = getattr(packet, parts[-1], None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"there is no {name!r:.60}")
    return found
