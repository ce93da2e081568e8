"""Let linear layers read weights that were laid out once for the CPU's matrix kernels.

Level 0, where asked for (``pack_weights``): oneDNN multiplies plain bf16 matrices as well, in another order.

Matches:
    linear(x, W, b), linear(x, t(W), b)      # bf16 parameters, the CPU has bf16 instructions
Becomes:
    pagoda::packed_linear(x, W, b)           # W is packed when the program is finished
Why it is faster:
    oneDNN multiplies blocked matrices. A plain weight is re-blocked at every call, which costs a third of the
    bandwidth of a decode step and about a sixth of the arithmetic of a prefill step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ...runtime.ops.packed_linear import can_pack, packed_linear
from ..fx_nodes import argument, callee, eliminate_dead_code, module_path, shape, value
from ..record import PassRecord, Rejection
from ..traced import TracedGraph

NAME = "pack_linears"


@dataclass(frozen=True)
class PackedWeight:
    """A graph input that packed linears read.

    Attributes:
        name: of the input.
        sources: names of the inputs that hold the same elements in the module's own tensors.
    """

    name: str
    sources: tuple[str, ...]


def pack_linears(traced: TracedGraph) -> PassRecord:
    """Replace linears over parameters. ``traced.notes["packed"]`` lists the ``PackedWeight`` entries.

    A weight that something else reads too (a head tied to the embedding), or that is stored transposed, gets another
    graph input. Flat (paged) graphs only: elsewhere the caller owns the weights.
    """
    record = PassRecord(NAME)
    if not traced.paged:
        return record
    packed: dict[fx.Node, PackedWeight] = {}
    inputs: dict[fx.Node, fx.Node] = {}
    for node in list(traced.graph.nodes):
        if node.target is not torch.ops.aten.linear.default:
            continue
        reason = _refusal(traced, node)
        if reason:
            record.rejections.append(Rejection(node.name, reason, module_path(node)))
            continue
        weight = argument(node, 1, "weight")
        if weight not in inputs:
            inputs[weight] = _packed_input(traced, weight)
            packed[inputs[weight]] = PackedWeight(inputs[weight].name, _sources(traced, _parameter(weight)))
        x, bias = argument(node, 0, "input"), argument(node, 2, "bias")
        with traced.before(node):
            traced.substitute(node, traced.call(packed_linear, x, inputs[weight], bias))
        record.matches += 1
    if packed:
        traced.notes["packed"] = [*traced.notes.get("packed", []), *packed.values()]
        eliminate_dead_code(traced.graph)
    return record


def _refusal(traced: TracedGraph, node: fx.Node) -> str:
    weight = argument(node, 1, "weight")
    name = _parameter(weight).name
    if name not in traced.constants and name not in traced.notes.get("merged", {}):
        return "the weight is computed, not a parameter"
    tensor = value(weight)
    if len(shape(weight)) != 2:
        return "the weight is no matrix"
    if tensor.device.type != "cpu" or not can_pack(tensor.dtype):
        return f"no packed {tensor.dtype} products on {tensor.device}"
    return ""


def _parameter(weight: fx.Node) -> fx.Node:
    """The graph input behind a weight, which may be transposed."""
    if callee(weight) == "t" and isinstance(weight.args[0], fx.Node):
        return weight.args[0]
    return weight


def _sources(traced: TracedGraph, parameter: fx.Node) -> tuple[str, ...]:
    merged: dict[str, tuple[str, ...]] = traced.notes.get("merged", {})
    return merged.get(parameter.name, (parameter.name,))


def _packed_input(traced: TracedGraph, weight: fx.Node) -> fx.Node:
    """The weight's graph input if linears alone read it as it is, else another one that holds the same elements."""
    if weight.op == "placeholder" and all(
        user.target is torch.ops.aten.linear.default and weight not in (user.args[0], *user.args[2:])
        for user in weight.users
    ):
        return weight
    name = f"packed_{_parameter(weight).name}"
    while name in traced.constants:
        name += "_"
    tensor = traced.constants[_parameter(weight).name].detach()
    return traced.add_constant(name, tensor if weight.op == "placeholder" else tensor.t())
