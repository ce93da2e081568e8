"""Runs of graphs in float32: the same operators on the same weights, without half precision's rounding between them.

What a rewrite gets slightly wrong hides behind the rounding of bfloat16; in float32 it shows.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..passes.fx_nodes import value

HALF = (torch.bfloat16, torch.float16)


class InFloat32(TorchDispatchMode):
    """Widens every half-precision tensor that an operator reads, and every half-precision dtype that it is told to
    make, to float32.

    Tensors that are written in place must be float32 already: the operator writes into what it is given.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = tuple(map(_wide, args))
        return func(*wide, **{name: _wide(item) for name, item in kwargs.items()}) if kwargs else func(*wide)


def _wide(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.float() if item.dtype in HALF else item
    if isinstance(item, (list, tuple)):
        return type(item)(map(_wide, item))
    return torch.float32 if item in HALF and isinstance(item, torch.dtype) else item


class Deferred(ABC):
    """A tensor that is made where it is read."""

    @abstractmethod
    def make(self) -> torch.Tensor:
        """The tensor; float32, if it is one of floating-point numbers."""


class Float32Graph:
    """A graph as a function of its inputs, computed in float32 node by node.

    Inputs may be ``Deferred``; each is made for the node that reads it and freed behind it, so that no more than a
    few widened weights are in memory at a time. What follows from ``constants`` alone is computed in their own
    precision, for that is what passes fold.

    Args:
        module: the graph.
        constants: names of inputs that always receive the same.
    """

    def __init__(self, module: fx.GraphModule, constants: Collection[str]) -> None:
        self._module = module
        self._widens = any(getattr(value(node), "dtype", None) in HALF for node in module.graph.nodes)
        self._last_use: dict[fx.Node, list[fx.Node]] = {}
        self._fixed: set[fx.Node] = set()
        for node in module.graph.nodes:
            inputs = node.all_input_nodes
            if node.name in constants if node.op == "placeholder" else inputs and self._fixed.issuperset(inputs):
                self._fixed.add(node)
        seen: set[fx.Node] = set()
        for node in reversed(module.graph.nodes):
            self._last_use[node] = [n for n in node.all_input_nodes if n not in seen]
            seen.update(self._last_use[node])

    def __call__(self, *args: Any) -> Sequence[Any]:
        given = iter(args)
        values: dict[fx.Node, Any] = {}
        nodes = list(self._module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                values[node] = next(given)
        mode: AbstractContextManager[Any] = InFloat32() if self._widens else nullcontext()
        with torch.no_grad():
            for node in nodes:
                if node in self._fixed:
                    self._run(node, values)
            with mode:
                for node in nodes:
                    if node.op == "output":
                        return fx.map_arg(node.args[0], values.__getitem__)  # type: ignore[no-any-return]
                    if node not in self._fixed:
                        self._run(node, values)
                        for unused in self._last_use[node]:
                            del values[unused]
        raise ValueError("the graph has no output")

    def _run(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        def read(n: fx.Node) -> Any:
            found = values[n]
            return found.make() if isinstance(found, Deferred) else found

        if node.op == "placeholder":
            return
        if node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(self._module)
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)
        if node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            target: Callable[..., Any] = node.target  # type: ignore[assignment]
            values[node] = target(*args, **kwargs)
