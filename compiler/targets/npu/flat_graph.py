"""A lowered graph in the form of Ascend's compilers: with tensors and single integers as inputs.

Nodes take lists of lengths as SymInt[] arguments. Traced as one input, such a list would be baked in; with an input
for each member, and a symbol for each, only its length is. (A symbol, because AOTAutograd takes a plain 0 or 1 for a
constant, and two equal integers for one.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....passes import TracedGraph
from ....passes.graph.fx_nodes import value
from ....runtime.program import is_cache_input

LENGTHS_ON_DEVICE = (
    torch.ops.npu.npu_lightning_indexer.default,
    torch.ops.npu.npu_sparse_flash_attention.default,
)
"""Operators that read blocks of caches where they lie and take lengths of sequences as tensors."""
_CHOICES = (torch.ops.aten.slice.Tensor, torch.ops.aten.gather.default)


@dataclass(frozen=True)
class FlatGraph:
    """A copy of a traced graph's module with flat inputs, and what to trace it with.

    Attributes:
        module: the copy.
        values: one fake tensor or SymInt per placeholder of the copy.
        constants: positions, among these, of tensors that are the same at every call.
        used: positions of the placeholders of the traced graph that the copy has too: those that something reads.
        lists: positions of its lists.
        length: of these lists.
        sizes: (position of a placeholder of the traced graph, dim) for each size that the copy takes as an integer
            behind all other inputs.
    """

    module: fx.GraphModule
    values: list[Any]
    constants: frozenset[int]
    used: tuple[int, ...]
    lists: tuple[int, ...]
    length: int
    sizes: tuple[tuple[int, int], ...]

    def flatten(self, inputs: Sequence[Any]) -> list[Any]:
        """The copy's inputs for the traced graph's.

        Raises:
            ValueError: lists of another length.
        """
        flat: list[Any] = []
        for i in self.used:
            given = inputs[i]
            if i not in self.lists:
                flat.append(given)
            elif len(given) == self.length:
                flat.extend(given)
            else:
                raise ValueError(f"inputs: compiled for lists of {self.length} integers, and {len(given)} are given")
        flat.extend(inputs[i].shape[dim] for i, dim in self.sizes)
        return flat


def list_inputs(traced: TracedGraph) -> tuple[int, ...]:
    """Positions of the placeholders that receive lists of integers."""
    return tuple(i for i, node in enumerate(traced.placeholders) if isinstance(value(node), list) and node.users)


def flat_graph(
    traced: TracedGraph, length: int, *, caches: Sequence[torch.Tensor] = (), with_sizes: bool = False
) -> FlatGraph:
    """Copy the module of ``traced`` with an integer input for each member of its lists.

    Args:
        traced: a lowered graph; it is not changed.
        length: of the lists.
        caches: the tensors of all caches, entry by entry as they are bound, if their sizes are to be constants of the
            copy.
        with_sizes: give the copy each size of a step input that has a symbol as an integer input too, as Dynamo does.
    """
    graph = fx.Graph()
    values: list[Any] = []
    constants: set[int] = set()
    copies: dict[fx.Node, Any] = {}
    used = [(i, node) for i, node in enumerate(traced.placeholders) if node.users]
    real_caches = dict(zip(cache_inputs(traced), caches, strict=False))
    for _, node in used:
        example = value(node)
        if isinstance(example, list):
            names = [f"{node.name}_{i}" for i in range(length)]
            copies[node] = [graph.placeholder(name) for name in names]
            values += [_symbol(traced, name, i + 2) for i, name in enumerate(names)]
            continue
        if is_constant(traced, node.name):
            constants.add(len(values))
            with traced.fake_mode:
                example = example.detach()
        elif node.name in real_caches:
            example = traced.fake_mode.from_tensor(real_caches[node.name], static_shapes=True)
        copies[node] = graph.node_copy(node)
        values.append(example)
    sizes = tuple(_sizes(used, traced)) if with_sizes else ()
    for i, dim in sizes:
        node = traced.placeholders[i]
        graph.placeholder(f"{node.name}_size_{dim}")
        values.append(value(node).shape[dim])
    for node in traced.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    return FlatGraph(
        module=fx.GraphModule(traced.module, graph),
        values=values,
        constants=frozenset(constants),
        used=tuple(i for i, _ in used),
        lists=list_inputs(traced),
        length=length,
        sizes=sizes,
    )


def cache_inputs(traced: TracedGraph) -> list[str]:
    """The placeholders that receive tensors of caches, in the order of the tensors that are bound, entry by entry.

    Placeholders of keys and values may stand before those of states, whatever the order of their layers."""
    return [f"{part.name}_{i}" for i, spec in enumerate(traced.caches) for part in spec.parts()]


def readers(node: fx.Node) -> list[fx.Node]:
    """What reads a node, or entries that are chosen of it."""
    return [
        reader
        for user in node.users
        for reader in (readers(user) if user.target in _CHOICES and user.args[0] is node else (user,))
    ]


def is_constant(traced: TracedGraph, name: str) -> bool:
    """True if the placeholder receives the same tensor at every call, which is known when the graph is linked."""
    return name in traced.constants or name in traced.notes.made_when_linked


def _sizes(used: Sequence[tuple[int, fx.Node]], traced: TracedGraph) -> Iterator[tuple[int, int]]:
    """Sizes of step inputs whose symbol no integer input has."""
    known = {size.node.expr for _, node in used if isinstance(size := value(node), torch.SymInt)}
    for i, node in used:
        example = value(node)
        if not isinstance(example, torch.Tensor) or is_constant(traced, node.name) or is_cache_input(node.name):
            continue
        for dim, size in enumerate(example.shape):
            if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
                continue
            if size.node.expr not in known:
                known.add(size.node.expr)
                yield i, dim


def _symbol(traced: TracedGraph, name: str, hint: int) -> torch.SymInt:
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    shapes, source = traced.fake_mode.shape_env, LocalSource(name)
    assert shapes is not None
    symbol = shapes.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    made = shapes.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(made, torch.SymInt)
    return made
