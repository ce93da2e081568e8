"""A part of an ATen graph between chosen inputs and outputs: run on given numbers, or compared by structure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .evaluate import at_sizes, is_size
from .fx_nodes import METADATA_CALLS, callee, mutated_arguments, numbers, value
from .record import NoMatch

if TYPE_CHECKING:
    import sympy

_MOST_NODES = 200


class OpenRegion(NoMatch):
    """The outputs are not computed from the inputs alone. The message says what else they read."""


class Region:
    """The nodes from ``inputs`` to ``outputs``.

    What it reads must be among the inputs: a parameter that happens to be zero would hide in a numeric comparison.

    Args:
        inputs: nodes whose values are given; what they are computed from does not belong to the region.
        outputs: nodes to be computed.

    Attributes:
        nodes: the nodes between them, inputs excluded and outputs included, in an order to run them in.

    Raises:
        OpenRegion: an output depends on something that is neither an input nor a size, or the region is too large.
    """

    def __init__(self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.nodes: list[fx.Node] = []
        done = set(self.inputs)
        pending = list(reversed(self.outputs))
        while pending:
            node = pending[-1]
            missing = [n for n in _operands(node) if n not in done] if node not in done else []
            if missing:
                pending += missing
                if len(pending) > 10 * _MOST_NODES:
                    raise OpenRegion("it is too large")
                continue
            pending.pop()
            if node in done:
                continue
            if not is_size(node) and (node.op != "call_function" or mutated_arguments(node)):
                raise OpenRegion(f"it reads {node.name}")
            done.add(node)
            self.nodes.append(node)
            if len(self.nodes) > _MOST_NODES:
                raise OpenRegion("it is too large")

    @property
    def symbols(self) -> list[sympy.Symbol]:
        """The free symbols of all sizes in the region, by name."""
        found: set[sympy.Symbol] = set()
        for node in (*self.inputs, *self.nodes):
            v = value(node)
            sizes = v.shape if isinstance(v, torch.Tensor) else (v,)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    found |= size.node.expr.free_symbols
        return sorted(found, key=str)

    def numbers(self) -> list[float]:
        """The finite numbers other than 0 that its operators compute with, each once, in order."""
        return list(dict.fromkeys(x for node in self.nodes for x in numbers(node)))

    def signature(self) -> Hashable:
        """Equal for regions that compute the same function of their inputs in the same way."""
        numbers = {node: i for i, node in enumerate((*self.inputs, *self.nodes))}
        lines: list[Hashable] = [_kind(node) for node in self.inputs]
        for node in self.nodes:
            if is_size(node):
                lines.append(str(value(node)))
            else:
                arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers.get(n, _kind(n))}")
                lines.append((str(node.target), repr(arguments)))
        return (*lines, *(numbers[node] for node in self.outputs))

    def run(self, sizes: Mapping[sympy.Symbol, int], given: Sequence[Any]) -> list[Any]:
        """The values of the outputs.

        Args:
            sizes: number for each symbol.
            given: values of the inputs, on the CPU.
        """
        values = dict(zip(self.inputs, given, strict=True))

        def lookup(node: fx.Node) -> Any:
            if node in values:
                return values[node]
            v = value(node)  # only its shape and dtype are read
            return torch.zeros(at_sizes(tuple(v.shape), sizes), dtype=v.dtype)

        for node in self.nodes:
            if is_size(node):
                values[node] = at_sizes(value(node), sizes)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lookup)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "cpu"}
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [values[node] for node in self.outputs]


def _operands(node: fx.Node) -> list[fx.Node]:
    """Nodes that the elements of ``node`` are computed from."""
    if is_size(node):
        return []
    first = node.args[0] if node.args and callee(node) in METADATA_CALLS else None
    return [n for n in node.all_input_nodes if n is not first]


def _kind(node: fx.Node) -> Hashable:
    v = value(node)
    return (str(v.dtype), str(tuple(v.shape))) if isinstance(v, torch.Tensor) else str(v)
