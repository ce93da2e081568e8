"""Parameters that linear layers read in a layout of their own, created by linking."""

from __future__ import annotations

import torch
from torch import fx

from ...runtime.ops.arguments import MoeArguments
from ...runtime.ops.linear.quantized_weight import Quantization
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.ops.moe.moe import moe
from .fx_nodes import argument, callee, shape
from .notes import PackedWeight
from .traced import TracedGraph


class PackedWeights:
    """Gives the linears of a graph their packed inputs, one for each weight; ``close`` notes them.

    A weight that something else reads too (a head tied to the embedding), or that is stored transposed, gets another
    graph input.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self._inputs: dict[fx.Node, fx.Node] = {}
        self._packed: list[PackedWeight] = []

    def linears(self) -> list[fx.Node]:
        """All linears of the graph; none where it is not paged: there the caller owns the weights."""
        if not self.traced.paged:
            return []
        return [node for node in self.traced.graph.nodes if node.target is torch.ops.aten.linear.default]

    def refusal(self, linear: fx.Node) -> str:
        """The reason why the weight of a linear cannot be packed; "" when it can."""
        weight = argument(linear, 1, "weight")
        name = _parameter(weight).name
        if name not in self.traced.constants and name not in self.traced.notes.merged:
            return "the weight is computed, not a parameter"
        return "" if len(shape(weight)) == 2 else "the weight is not a matrix"

    def stored(self, linear: fx.Node) -> StoredWeight | None:
        """The weight of a linear, or one of those that are its rows, as the checkpoint stores it; None: as floats."""
        name = _parameter(argument(linear, 1, "weight")).name
        sources = self.traced.notes.merged.get(name, (name,))
        found = self.traced.constants.get(sources[0])
        return found if isinstance(found, StoredWeight) else None

    def input_for(
        self, linear: fx.Node, quantization: Quantization | None = None, *, stored: bool = False
    ) -> fx.Node:
        """The graph input that is to hold the packed weight of a linear."""
        weight = argument(linear, 1, "weight")
        if weight not in self._inputs:
            self._inputs[weight] = node = self._packed_input(weight)
            parameter = _parameter(weight)
            sources = self.traced.notes.merged.get(parameter.name, (parameter.name,))
            self._packed.append(PackedWeight(node.name, sources, quantization, stored))
        return self._inputs[weight]

    def experts(self) -> list[fx.Node]:
        """All mixtures of experts of the graph; none where it is not paged."""
        if not self.traced.paged:
            return []
        return [node for node in self.traced.graph.nodes if node.target is moe]

    def refusal_of_experts(self, node: fx.Node) -> str:
        """The reason why the weights of experts cannot be packed; "" when they can."""
        call: MoeArguments[fx.Node] = MoeArguments(*node.args)  # type: ignore[arg-type]
        for weight in (call.up, call.down):
            if weight.op != "placeholder" or weight.name not in self.traced.constants:
                return "one of their weights is computed, not a parameter"
            if set(weight.users) != {node}:
                return "another operator also reads one of their weights"
        return ""

    def note_experts(self, weight: fx.Node, scheme: Quantization, *, stored: bool, transposed: bool) -> None:
        """Note that the graph input of experts' weights is to hold them packed."""
        self._packed.append(PackedWeight(weight.name, (weight.name,), scheme, stored, transposed))

    def close(self) -> None:
        """Note what was packed in ``traced.notes.packed``."""
        self.traced.notes.packed += self._packed

    def _packed_input(self, weight: fx.Node) -> fx.Node:
        """The weight's graph input if linears alone read it as it is, else another one with the same elements."""
        if weight.op == "placeholder" and all(
            user.target is torch.ops.aten.linear.default and weight not in (user.args[0], *user.args[2:])
            for user in weight.users
        ):
            return weight
        name = f"packed_{_parameter(weight).name}"
        while name in self.traced.constants:
            name += "_"
        source, is_turned = _parameter(weight).name, weight.op != "placeholder"
        tensor = self.traced.constants[source].detach()
        if (part := self.traced.notes.parts.get(source)) is not None:
            self.traced.notes.parts[name] = part.turned() if is_turned else part
        return self.traced.add_constant(name, tensor.transpose(0, 1) if is_turned else tensor)


def _parameter(weight: fx.Node) -> fx.Node:
    """The graph input behind a weight, which may be transposed."""
    if callee(weight) == "t" and isinstance(weight.args[0], fx.Node):
        return weight.args[0]
    return weight
