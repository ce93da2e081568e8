"""Graph inputs of quantized products for Ascend: what linking is to make of a weight, noted once for each."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from .....runtime.ops.linear.quantized_weight import Quantization
from .....runtime.ops.linear.stored_weight import StoredWeight
from .....runtime.ops.linear.weight_format import WeightFormat
from .....runtime.ops.npu.int4 import PER_INT32
from ....graph.fx_nodes import shape, value
from ....graph.notes import QuantizedInputs
from ....graph.traced import TracedGraph


def fitting(scheme: Quantization, width: int, outputs: int) -> Quantization | str:
    """The scheme for a matrix of so many inputs and outputs: groups as long as its rows are rows; or why none is.

    Args:
        scheme: as requested, or as stored.
        width: inputs of the matrix.
        outputs: of the matrix.
    """
    if scheme.bits == 4 and outputs % PER_INT32:
        return f"{outputs} outputs of 4 bits; {PER_INT32} share an int32"
    return replace(scheme, group_size=0, whole_rows=False) if scheme.group_size >= width else scheme


def why_wide(form: WeightFormat) -> str:
    """Why no operator multiplies integers that are stored so by rows of int8; "" where one may."""
    if form.zeros or form.ordered:
        what = "zeros of their own" if form.zeros else "an order of inputs"
        return f"weights with {what}; beside rows of int8 there is none"
    if form.bits == 8 and form.group_size:
        return f"8 bits in groups of {form.group_size}; beside rows of int8 an output has one scale"
    return ""


class Rounded(NamedTuple):
    """The graph inputs that stand for a weight; see ``QuantizedInputs``."""

    numbers: fx.Node
    scales: fx.Node
    offsets: fx.Node | None
    sums: fx.Node | None = None
    whole_bias: fx.Node | None = None


class QuantizedInputsOf:
    """Gives the products of a graph inputs for rounded weights; ``close`` notes those that are read.

    Args:
        traced: the graph.
    """

    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self._made: dict[tuple[fx.Node, Quantization, torch.dtype, bool], QuantizedInputs] = {}
        self._wide: dict[str, str] = {}
        self._names: set[str] = set()  # a graph never gives one again

    def is_parameter(self, weight: fx.Node) -> bool:
        """True if a weight is a graph input that always receives the same tensor."""
        names = self.traced.constants, self.traced.notes.merged
        return weight.op == "placeholder" and any(weight.name in known for known in names)

    def stored(self, weight: fx.Node) -> StoredWeight | None:
        """A weight, or one of those that are its rows, as a quantized checkpoint stores it; None: as floats."""
        sources = self.traced.notes.merged.get(weight.name, (weight.name,))
        found = self.traced.constants.get(sources[0])
        return found if isinstance(found, StoredWeight) else None

    def made_for_8_bits(self, weight: fx.Node) -> WeightFormat | None:
        """Return the format of a weight stored for 8-bit inputs; None for others, or if inputs keep 16 bits."""
        stored = self.stored(weight)
        as_made = stored is not None and stored.form.input_bits == 8 and self.traced.input_bits != 16
        return stored.form if stored is not None and as_made else None

    def of(
        self,
        weight: fx.Node,
        quantization: Quantization,
        scale_dtype: torch.dtype,
        *,
        turned: bool = False,
        offsets: bool = False,
        sums: bool = False,
        bias: fx.Node | None = None,
        whole_bias: bool = False,
    ) -> Rounded:
        """The inputs for a weight.

        Args:
            weight: see ``QuantizedInputs.source``; of 4 bits, 8 divides its outputs.
            quantization: how it is rounded, or stored.
            scale_dtype: of scales and offsets.
            turned: it is ``[in, out]``.
            offsets: give it some where all are 0, too.
            sums: see ``QuantizedInputs``.
            bias: the parameter of which ``whole_bias`` is made; or None.
            whole_bias: see ``QuantizedInputs``.
        """
        form = weight, quantization, scale_dtype, turned
        if form not in self._made:
            parts = [f"int{quantization.bits}", "scales"]
            parts += ["offsets"] * (offsets or quantization.zeros) + ["sums"] * sums + ["bias"] * whole_bias
            names = {part: self._free_name(f"{part}_{weight.name}") for part in parts}
            made = QuantizedInputs(
                weight.name,
                names[parts[0]],
                names["scales"],
                names.get("offsets", ""),
                quantization,
                scale_dtype,
                turned,
                self.stored(weight) is not None,
                names.get("sums", ""),
                names.get("bias", ""),
                "" if bias is None else bias.name,
            )
            self._made[form] = made
            *experts, inputs, outputs = map(int, shape(weight))
            if not turned and not experts:
                inputs, outputs = outputs, inputs
            if quantization.bits == 4:
                self._add(made.numbers, [*experts, inputs, outputs // PER_INT32], torch.int32, weight)
            else:
                self._add(made.numbers, [*experts, inputs, outputs], torch.int8, weight)
            groups = [-(-inputs // quantization.group_size)] if quantization.group_size else [1] * sums
            for name in filter(None, (made.scales, made.offsets)):
                self._add(name, [*experts, *groups, outputs], scale_dtype, weight)
            if made.sums:
                self._add(made.sums, [*experts, outputs], torch.float32, weight)
            if made.whole_bias:
                self._add(made.whole_bias, [outputs], torch.int32, weight)
        made = self._made[form]
        more = (
            self.traced.placeholder(name) if name else None for name in (made.offsets, made.sums, made.whole_bias)
        )
        return Rounded(self.traced.placeholder(made.numbers), self.traced.placeholder(made.scales), *more)

    def forget(self, weight: fx.Node) -> None:
        """Take back the inputs for a weight that nothing reads: another form of it is tried."""
        for form in [form for form in self._made if form[0] is weight]:
            nodes = [self.traced.placeholder(name) for name in self._made[form].made]
            if any(node.users for node in nodes):
                continue
            for node in nodes:
                self.traced.graph.erase_node(node)
            del self._made[form]

    def wide(self, bias: fx.Node) -> fx.Node:
        """The graph input for a bias in float32."""
        if value(bias).dtype is torch.float32:
            return bias
        name = next((made for made, source in self._wide.items() if source == bias.name), "")
        if not name:
            name = self._free_name(f"float32_{bias.name}")
            self._wide[name] = bias.name
            self._add(name, [*map(int, shape(bias))], torch.float32, bias)
        return self.traced.placeholder(name)

    def close(self) -> None:
        """Note what is read in ``traced.notes``, and take the other inputs back."""
        notes = self.traced.notes
        for made in self._made.values():
            nodes = [self.traced.placeholder(name) for name in made.made]
            if any(node.users for node in nodes):
                notes.quantized.append(made)
                continue
            for node in nodes:
                self.traced.graph.erase_node(node)
        for name, source in self._wide.items():
            node = self.traced.placeholder(name)
            if node.users:
                notes.widened[name] = source
            else:
                self.traced.graph.erase_node(node)

    def _add(self, name: str, sizes: list[int], dtype: torch.dtype, like: fx.Node) -> None:
        with self.traced.fake_mode:
            example = torch.empty(sizes, dtype=dtype, device=value(like).device)
        self.traced.add_deferred_constant(name, example)

    def _free_name(self, name: str) -> str:
        while name in self._names or any(node.name == name for node in self.traced.placeholders):
            name += "_"
        self._names.add(name)
        return name
