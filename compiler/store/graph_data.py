"""A graph as plain data, and back: what its nodes call, on what, under which names. Fake values are not kept.

A graph becomes Python source that is run, so everything that gets into it is looked up in a list or has one of a few
types. Names are identifiers; what is called is an operator of a known namespace or one of ``_FUNCTIONS``.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Mapping
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
_OF_TORCH = {
    str(item).removeprefix("torch."): item
    for item in vars(torch).values()
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format))
}
_CPU = torch.device("cpu")


class CannotStore(Exception):
    """The graph holds something that has no plain form. The message says what."""


def to_data(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Nodes as ``(op, name, target, args, kwargs)``, in order; ``kwargs`` as pairs.

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
        kwargs = tuple((key, _plain(x, node)) for key, x in node.kwargs.items())
        rows.append((node.op, node.name, target, _plain(node.args, node), kwargs))
    return rows


def from_data(rows: Any) -> fx.GraphModule:
    """The graph of ``to_data`` as a module.

    Raises:
        ValueError: the data is not a graph, or calls what is not allowed or what there is not.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    if not isinstance(rows, list) or not all(isinstance(row, tuple) and len(row) == 5 for row in rows):
        raise ValueError("the graph is not a list of nodes")
    for op, name, target, plain_args, plain_kwargs in rows:
        args, kwargs = _value(plain_args, nodes), _named(plain_kwargs, nodes)
        if not isinstance(args, tuple):
            raise ValueError(f"the arguments of {name} are {args!r:.60}")
        _check_name(name)
        if op == "call_function":
            node = graph.create_node(op, _function(target, kwargs), args, kwargs, name=name)
        elif op == "placeholder" and target == name and not args and not kwargs:
            node = graph.create_node(op, target, name=name)
        elif op == target == "output" and len(args) == 1 and not kwargs and len(nodes) == len(rows) - 1:
            node = graph.create_node(op, target, args, name=name)
        else:
            raise ValueError(f"{name} is not a node of a graph: {op!r:.60} of {target!r:.60}")
        if node.name != name:
            raise ValueError(f"a second node is called {name}")
        nodes[name] = node
    if not rows or rows[-1][0] != "output":
        raise ValueError("the graph has no output")
    return fx.GraphModule(torch.nn.Module(), graph)


def _plain(item: Any, node: fx.Node) -> Any:
    """Literals stand for themselves; all else is a tuple whose first item says what it is."""
    if isinstance(item, fx.Node):
        return ("node", item.name)
    if item is None or type(item) in (bool, int, float, str):
        return item
    if isinstance(item, (list, tuple)):
        return ("list" if isinstance(item, list) else "tuple", *(_plain(x, node) for x in item))
    if isinstance(item, slice):
        return ("slice", *(_plain(x, node) for x in (item.start, item.stop, item.step)))
    if isinstance(item, torch.device) and item == _CPU:
        return ("device", "cpu")
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format)):
        return ("torch", str(item).removeprefix("torch."))
    raise CannotStore(f"{node.name} has an argument of type {type(item).__name__}")


def _value(item: Any, nodes: dict[str, fx.Node]) -> Any:
    if item is None or type(item) in (bool, int, float, str):
        return item
    if type(item) is not tuple or not item:
        raise ValueError(f"{item!r:.60} is not an argument")
    kind, *rest = item
    if kind in ("node", "torch", "device"):
        tables: dict[str, Mapping[str, Any]] = {"node": nodes, "torch": _OF_TORCH, "device": {"cpu": _CPU}}
        known = tables[kind]
        if len(rest) != 1 or not isinstance(rest[0], str) or rest[0] not in known:
            raise ValueError(f"{item!r:.60} is not a {kind} of a graph")
        return known[rest[0]]
    inner = [_value(x, nodes) for x in rest]
    if kind == "list":
        return inner
    if kind == "tuple":
        return tuple(inner)
    if kind == "slice" and len(inner) == 3:
        return slice(*inner)
    raise ValueError(f"{kind!r:.60} is not a kind of argument")


def _named(pairs: Any, nodes: dict[str, fx.Node]) -> dict[str, Any]:
    if type(pairs) is not tuple or not all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{pairs!r:.60} are not arguments by name")
    return {key: _value(x, nodes) for key, x in pairs}


def _check_name(name: Any) -> None:
    if type(name) is not str or not name.isascii() or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r:.60} is not a name of a node")


def _function_name(target: Any) -> str:
    name = f"operator {target}" if isinstance(target, torch._ops.OpOverload) else _NAMES.get(target, "")
    try:
        if name and _found(name) is target:
            return name
    except ValueError as error:
        raise CannotStore(str(error)) from error
    raise CannotStore(f"it calls {target!r}, which is not among the functions that can be stored")


def _function(name: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    function = _found(name)
    known = {a.name for a in function._schema.arguments} if isinstance(function, torch._ops.OpOverload) else ()
    for key in kwargs:
        if key not in known:
            raise ValueError(f"{name} has no argument {key!r:.60}")
    return function


def _found(name: Any) -> Callable[..., Any]:
    """The function of a name.

    Raises:
        ValueError: it is none that a stored graph may call.
    """
    if type(name) is not str:
        raise ValueError(f"{name!r:.60} is not a function")
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    parts = name.removeprefix("operator ").split(".")
    if not name.startswith("operator ") or len(parts) != 3 or parts[0] not in _NAMESPACES:
        raise ValueError(f"a stored graph may not call {name!r:.60}")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    found = getattr(packet, parts[2], None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(found, torch._ops.OpOverload) or str(found) != ".".join(parts):
        raise ValueError(f"there is no {name!r:.60}")
    if any(argument.name == "filename" for argument in found._schema.arguments):
        raise ValueError(f"a stored graph may not call {name!r:.60}, which opens files")
    return found
