"""A graph as plain data, and back: what its nodes call, on what, under which names. Fake values are not kept."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_MODULES = ("_operator", "math", "torch")
"""Where functions that a graph calls may come from; operators are found by their names."""


class CannotStore(Exception):
    """The graph holds something that has no plain form. The message says what."""


def to_data(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Nodes as ``(op, name, target, args, kwargs)``, in order.

    Raises:
        CannotStore: a node is not made of operators, functions of torch, tensors' names and literals.
    """
    rows = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "call_method", "output"):
            raise CannotStore(f"{node.name} is a {node.op} node")
        target = _function_name(node.target) if node.op == "call_function" else str(node.target)
        rows.append((node.op, node.name, target, _plain(node.args, node), _plain(node.kwargs, node)))
    return rows


def from_data(rows: list[tuple[Any, ...]]) -> fx.GraphModule:
    """The graph of ``to_data`` as a module.

    Raises:
        AttributeError, ImportError, KeyError, ValueError: the data is no graph, or names what there is not.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs in rows:
        called = _function(target) if op == "call_function" else target
        node = graph.create_node(op, called, _value(args, nodes), _value(kwargs, nodes), name=name)
        if node.name != name:
            raise ValueError(f"a second node is called {name}")
        nodes[name] = node
    return fx.GraphModule(torch.nn.Module(), graph)


def _plain(item: Any, node: fx.Node) -> Any:
    """Literals stand for themselves; all else is a tuple whose first item says what it is."""
    if isinstance(item, fx.Node):
        return ("node", item.name)
    if item is None or type(item) in (bool, int, float, str):
        return item
    if isinstance(item, (list, tuple)):
        return ("list" if isinstance(item, list) else "tuple", *(_plain(x, node) for x in item))
    if isinstance(item, dict):
        return ("dict", *((key, _plain(x, node)) for key, x in item.items()))
    if isinstance(item, slice):
        return ("slice", *(_plain(x, node) for x in (item.start, item.stop, item.step)))
    if isinstance(item, torch.device):
        return ("device", str(item))
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format)):
        return ("torch", str(item).removeprefix("torch."))
    raise CannotStore(f"{node.name} has an argument of type {type(item).__name__}")


def _value(item: Any, nodes: dict[str, fx.Node]) -> Any:
    if not isinstance(item, tuple):
        return item
    kind, *rest = item
    if kind == "node":
        return nodes[rest[0]]
    if kind == "device":
        return torch.device(rest[0])
    if kind == "torch":
        return getattr(torch, rest[0])
    if kind == "dict":
        return {key: _value(x, nodes) for key, x in rest}
    inner = [_value(x, nodes) for x in rest]
    if kind == "list":
        return inner
    if kind == "tuple":
        return tuple(inner)
    if kind == "slice":
        return slice(*inner)
    raise ValueError(f"{kind!r} is no kind of argument")


def _function_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"operator {target}"
    name = f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    try:
        found = _function(name)
    except (AttributeError, ImportError, ValueError):
        found = None
    if found is not target:
        raise CannotStore(f"it calls {target!r}, which has no name")
    return name


def _function(name: str) -> Callable[..., Any]:
    if name.startswith("operator "):
        found: Any = torch.ops
        parts = name.removeprefix("operator ").split(".")
    else:
        module, _, path = name.partition(":")
        if module.split(".")[0] not in _MODULES:
            raise ValueError(f"{name} is no function of torch")
        found, parts = importlib.import_module(module), path.split(".")
    for part in parts:
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
