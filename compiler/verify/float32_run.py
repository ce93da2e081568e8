"""Runs of graphs node by node: in float32, the same operators on the same weights without half precision's rounding
between them, and of several calls together, so that a weight that has to be made is made once.

What a rewrite gets slightly wrong hides behind the rounding of bfloat16; in float32 it shows.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ...passes.graph.fx_nodes import callee, mutated_arguments, storage_key, value
from ..tolerance import HALF
from .wide_products import AT_ONCE, linear

_COMPARES_DTYPES = frozenset({"conv1d"})
"""Functions that refuse tensors of different dtypes before a dispatch mode sees them."""
_Runs: TypeAlias = "Sequence[dict[fx.Node, Any]]"
"""Of each call, the values of the nodes that have run and are still read."""


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
        """The tensor; float32 for a ``Float32Graph``, if it is one of floating-point numbers."""

    def rows(self, index: slice | torch.Tensor) -> torch.Tensor:
        """``make()[index]``."""
        return self.make()[index]

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The size of its first dim."""


class NodeByNode:
    """A graph as a function of its inputs, computed node by node.

    Inputs may be ``Deferred``; each is made for the node that reads it and freed behind it, of large matrices some
    rows at a time, so that few of them are in memory at a time.

    Args:
        module: the graph.
        constants: names of inputs that always receive the same.
    """

    _widens = False

    def __init__(self, module: fx.GraphModule, constants: Collection[str]) -> None:
        self._module = module
        self._last_use: dict[fx.Node, list[fx.Node]] = {}
        written = {storage_key(target) for n in module.graph.nodes for target in mutated_arguments(n)}
        self._own: list[fx.Node] = []
        self._fixed: set[fx.Node] = set()
        for node in module.graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "placeholder" and node.name in constants:
                (self._own.append if storage_key(node) in written else self._fixed.add)(node)
            elif inputs and self._fixed.issuperset(inputs):
                self._fixed.add(node)
        seen: set[fx.Node] = set()
        for node in reversed(module.graph.nodes):
            self._last_use[node] = [n for n in node.all_input_nodes if n not in seen]
            seen.update(self._last_use[node])

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self.together([args])[0]

    def together(self, calls: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """The results of several calls, each node run for all of them before the next one: a weight is made once.

        Calls that write into the same tensors do so in their order, node by node. That is right for caches, of which
        a step reads no more than earlier steps and itself wrote. Of constants that the graph writes into, such as a
        rotary table for the length at hand, each call has copies of its own.
        """
        runs: list[dict[fx.Node, Any]] = []
        nodes = list(self._module.graph.nodes)
        for args in calls:
            given = iter(args)
            values = {node: next(given) for node in nodes if node.op == "placeholder"}
            for node in self._own:
                if isinstance(values[node], torch.Tensor):
                    values[node] = values[node].clone()
            runs.append(values)
        as_it_is: AbstractContextManager[Any] = nullcontext()
        mode = InFloat32() if self._widens else as_it_is
        with torch.no_grad():
            for node in nodes:
                if node in self._fixed:
                    self._run(node, runs, as_it_is)
            for node in nodes:
                if node.op == "output":
                    return [fx.map_arg(node.args[0], values.__getitem__) for values in runs]
                if node not in self._fixed:
                    self._run(node, runs, mode)
                    for values in runs:
                        for unused in self._last_use[node]:
                            del values[unused]
        raise ValueError("the graph has no output")

    def _run(self, node: fx.Node, runs: _Runs, mode: AbstractContextManager[Any]) -> None:
        if node.op == "placeholder":
            return
        if node.op == "get_attr":
            for values in runs:
                values[node] = operator.attrgetter(str(node.target))(self._module)
            return
        by_rows = _BY_ROWS.get(callee(node))
        if by_rows is not None and by_rows(node, runs, self._widens):
            return
        made: dict[int, torch.Tensor] = {}
        for values in runs:

            def read(n: fx.Node, values: dict[fx.Node, Any] = values) -> Any:
                found = values[n]
                if not isinstance(found, Deferred):
                    return found
                if id(found) not in made:
                    made[id(found)] = found.make()
                return made[id(found)]

            args, kwargs = fx.map_arg((node.args, node.kwargs), read)
            if self._widens and callee(node) in _COMPARES_DTYPES:
                args = tuple(map(_wide, args))
            with mode:  # in which weights are not made: it would widen each of them twice
                if node.op == "call_method":
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    target: Callable[..., Any] = node.target  # type: ignore[assignment]
                    values[node] = target(*args, **kwargs)


class Float32Graph(NodeByNode):
    """The same computed in float32. What follows from ``constants`` alone is computed in their own precision, for
    that is what passes fold.
    """

    def __init__(self, module: fx.GraphModule, constants: Collection[str]) -> None:
        super().__init__(module, constants)
        self._widens = any(getattr(value(node), "dtype", None) in HALF for node in module.graph.nodes)


def _look_up(node: fx.Node, runs: _Runs, widens: bool) -> bool:
    """Run ``embedding`` for all calls with the rows that they name; False where its table is there already."""
    tables = [n for n in node.all_input_nodes if isinstance(runs[0][n], Deferred)]
    others = [n for n in node.all_input_nodes if n not in tables]
    renormalizes = node.kwargs.get("max_norm") is not None or any(node.args[3:4])
    if len(tables) != 1 or len(others) != 1 or renormalizes:
        return False
    for values in runs:
        ids = values[others[0]]
        rows = values[tables[0]].rows(ids.flatten())
        values[node] = rows.unflatten(0, ids.shape)
    return True


def _multiply(node: fx.Node, runs: _Runs, widens: bool) -> bool:
    """Run ``linear`` for all calls in one product, some rows of its weight at a time; False where the weight is there
    already."""
    x, weight, *rest = node.args
    made = isinstance(weight, fx.Node) and runs[0][weight]
    if not isinstance(made, Deferred) or node.kwargs:
        return False
    given = [values[x] for values in runs]  # type: ignore[index]
    if any(isinstance(rows, Deferred) or rows.dim() < 2 for rows in given):
        return False
    joined = torch.cat([rows.flatten(0, -2) for rows in given])
    bias = runs[0][rest[0]] if rest and isinstance(rest[0], fx.Node) else None
    bias = bias.make() if isinstance(bias, Deferred) else bias
    if widens:
        joined, bias = _wide(joined), _wide(bias)
    parts, count = [], max(1, AT_ONCE // (4 * joined.shape[-1]))
    for first in range(0, made.num_rows, count):
        at = slice(first, first + count)
        part = made.rows(at) if made.num_rows > count else made.make()
        parts.append(linear(joined, part, None if bias is None else bias[at]))
    product = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    for values, rows, own in zip(runs, given, product.split([r.shape[:-1].numel() for r in given]), strict=True):
        values[node] = own.view(*rows.shape[:-1], -1)
    return True


_BY_ROWS = {"embedding": _look_up, "linear": _multiply}
