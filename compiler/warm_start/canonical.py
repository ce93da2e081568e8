"""A graph in front of the passes that cut and lower it as plain data, with its fake values; and back, for a device.

What a rank lowers by itself is made of this. The fake values of inputs are kept, those of all other nodes computed
again: sizes are numbers, or the symbol of an input's size and a number that is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import value
from ...runtime.ops.linear.stored_weight import StoredWeight
from .graph_data import CannotStore, from_data
from .restore import Outdated, StoredProgram

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

Size = int | tuple[str, int]
"""A number, or the name of a symbol and what is added to it."""

_NOTED = ("step_field", "cache_index")


@dataclass(frozen=True)
class CanonicalGraph:
    """What ``StoredProgram.graph`` leaves out.

    Attributes:
        hints: symbol → the number that it stood for.
        inputs: each input that is no constant → its dtype, sizes and the order of its dims in memory; those that are
            numbers have no dtype and one size.
        noted: input → what passes noted of it.
        modules: lists of modules, from the outermost to the innermost, as (key, path, class).
        module_of: node → the list that it was traced in.
    """

    hints: dict[str, int]
    inputs: dict[str, tuple[torch.dtype | None, tuple[Size, ...], tuple[int, ...]]]
    noted: dict[str, dict[str, Any]]
    modules: list[tuple[tuple[str, str, str], ...]]
    module_of: dict[str, int]

    @classmethod
    def of(cls, traced: TracedGraph) -> CanonicalGraph:
        """The part of a graph that is not in its nodes.

        Raises:
            CannotStore: an input has a size that has no plain form.
        """
        hints: dict[str, int] = {}
        inputs = {
            node.name: _example(value(node), node.name, hints)
            for node in traced.placeholders
            if node.name not in traced.constants
        }
        lists: dict[tuple[tuple[str, str, str], ...], int] = {}
        module_of = {}
        for node in traced.graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                named = tuple(
                    (key, str(path), getattr(kind, "__name__", str(kind))) for key, (path, kind) in stack.items()
                )
                module_of[node.name] = lists.setdefault(named, len(lists))
        noted = {
            node.name: found
            for node in traced.placeholders
            if (found := {key: node.meta[key] for key in _NOTED if key in node.meta})
        }
        return cls(hints, inputs, noted, list(lists), module_of)


def canonical_graph(
    canonical: CanonicalGraph, stored: StoredProgram, constants: Mapping[str, torch.Tensor], device: torch.device
) -> TracedGraph:
    """The graph that was described, over constants on any device, as one that runs on ``device``.

    Raises:
        Outdated: a constant is missing.
        ValueError: it calls what there is not.
    """
    linkage = stored.linkage
    module = from_data(stored.graph)
    # Not at the top: a start from a stored program imports no compiler.
    from torch._dynamo.source import LocalSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    symbols: dict[str, Any] = {}
    for name, hint in canonical.hints.items():
        source = LocalSource(name)
        made = shapes.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        symbols[name] = shapes.create_symintnode(made, hint=hint, source=source)

    def number(size: Size) -> Any:
        return size if isinstance(size, int) else symbols[size[0]] + size[1]

    traced = TracedGraph(
        module,
        mode,
        dict(constants),
        input_ids=linkage.input_ids,
        position_ids=linkage.position_ids,
        caches=list(linkage.caches),
        step_inputs=list(linkage.step_inputs),
        max_positions=linkage.max_model_len,
    )
    traced.notes.rope_switch = linkage.rope_switch
    traced.notes.fold(linkage.folded)
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node.name in canonical.inputs:
            dtype, sizes, order = canonical.inputs[node.name]
            with mode:
                node.meta["example_value"] = (
                    number(sizes[0])
                    if dtype is None
                    else torch.empty([number(sizes[dim]) for dim in order], dtype=dtype, device=device).permute(
                        [order.index(dim) for dim in range(len(order))]
                    )
                )
        elif node.op == "placeholder":
            if node.name not in constants:
                raise Outdated(f"nothing is there for {node.name}")
            node.meta["example_value"] = _fake(constants[node.name], mode, device)
        elif node.op == "call_function":
            node.args, node.kwargs = _on(device, (node.args, node.kwargs))
            traced.propagate(node)
        node.meta.update(canonical.noted.get(node.name, {}))
        if node.name in canonical.module_of:
            stack = canonical.modules[canonical.module_of[node.name]]
            node.meta["nn_module_stack"] = {key: (path, kind) for key, path, kind in stack}
    traced.recompile()
    return traced


def _example(
    example: Any, name: str, hints: dict[str, int]
) -> tuple[torch.dtype | None, tuple[Size, ...], tuple[int, ...]]:
    if isinstance(example, torch.SymInt):
        return None, (_size(example, name, hints),), ()
    if not isinstance(example, torch.Tensor):
        raise CannotStore(f"graph input {name} is a {type(example).__name__}")
    order = sorted(range(example.dim()), key=lambda dim: (-_hint(example.stride(dim)), dim))
    return example.dtype, tuple(_size(size, name, hints) for size in example.shape), tuple(order)


def _size(size: Any, name: str, hints: dict[str, int]) -> Size:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    symbols = list(expression.free_symbols)
    rest = expression - symbols[0]
    if len(symbols) != 1 or not rest.is_Integer:
        raise CannotStore(f"graph input {name} has a size of {size}")
    hints.setdefault(str(symbols[0]), _hint(size) - int(rest))
    return str(symbols[0]), int(rest)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        if isinstance(tensor, StoredWeight):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _on(device: torch.device, arguments: Any) -> Any:
    """Arguments that name a device name this one."""
    return fx.node.map_aggregate(arguments, lambda item: device if isinstance(item, torch.device) else item)
