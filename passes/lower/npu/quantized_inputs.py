"""Graph inputs of quantised products for Ascend: what linking is to make of a weight, noted once for each."""

from __future__ import annotations

import torch
from torch import fx

from ....runtime.ops.quantized_weight import Quantization
from ....runtime.ops.stored_weight import StoredWeight
from ...graph.fx_nodes import shape, value
from ...graph.notes import QuantizedInputs
from ...graph.traced import TracedGraph


class QuantizedInputsOf:
    """Gives the products of a graph inputs for rounded weights; ``close`` notes those that are read.

    Args:
        traced: the graph.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self._made: dict[fx.Node, QuantizedInputs] = {}

    def is_parameter(self, weight: fx.Node) -> bool:
        """True if a weight is a graph input that always receives the same tensor."""
        names = self.traced.constants, self.traced.notes.merged
        return weight.op == "placeholder" and any(weight.name in known for known in names)

    def stored(self, weight: fx.Node) -> StoredWeight | None:
        """A weight, or one of those that are its rows, as a quantised checkpoint stores it; None: as floats."""
        sources = self.traced.notes.merged.get(weight.name, (weight.name,))
        found = self.traced.constants.get(sources[0])
        return found if isinstance(found, StoredWeight) else None

    def of(
        self,
        weight: fx.Node,
        quantization: Quantization,
        scale_dtype: torch.dtype,
        *,
        turned: bool = False,
        stored: bool = False,
    ) -> tuple[fx.Node, fx.Node]:
        """The inputs for the numbers and the scales of a weight; see ``QuantizedInputs``."""
        if weight not in self._made:
            names = [self._free_name(f"{part}_{weight.name}") for part in ("int8", "scales")]
            made = QuantizedInputs(
                weight.name, names[0], names[1], "", quantization, scale_dtype, turned=turned, stored=stored
            )
            self._made[weight] = made
            sizes = [*map(int, shape(weight))]
            if not turned and len(sizes) == 2:
                sizes.reverse()
            self._add(names[0], sizes, torch.int8, weight)
            self._add(names[1], [*sizes[:-2], sizes[-1]], scale_dtype, weight)
        made = self._made[weight]
        return self.traced.placeholder(made.numbers), self.traced.placeholder(made.scales)

    def close(self) -> None:
        """Note what is read in ``traced.notes.quantized``, and take the other inputs back."""
        for made in self._made.values():
            nodes = [self.traced.placeholder(name) for name in made.made]
            if any(node.users for node in nodes):
                self.traced.notes.quantized.append(made)
                continue
            for node in nodes:
                self.traced.graph.erase_node(node)

    def _add(self, name: str, sizes: list[int], dtype: torch.dtype, like: fx.Node) -> None:
        with self.traced.fake_mode:
            example = torch.empty(sizes, dtype=dtype, device=value(like).device)
        self.traced.add_deferred_constant(name, example)

    def _free_name(self, name: str) -> str:
        while any(node.name == name for node in self.traced.placeholders):
            name += "_"
        return name
