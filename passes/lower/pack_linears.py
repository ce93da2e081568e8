"""Let linear layers read weights that were laid out once for the CPU's matrix kernels, layers of one input together.

Matches:
    linear(x, W1, b1), linear(x, W2, b2), ...      # bf16 parameters, the CPU has bf16 instructions
Becomes:
    y = pagoda::packed_linear(x, [W1, W2, ...], [b1, b2, ...])     # packed when the program is finished
    narrow(y, -1, 0, n1), narrow(y, -1, n1, n2), ...
Why it is faster:
    oneDNN multiplies blocked matrices. A plain weight is re-blocked at every call, which costs a third of the
    bandwidth of a decode step and about a sixth of the arithmetic of a prefill step. The query, key and value
    projections, and the gate and up projections, share one call: a call on few rows costs tens of microseconds
    beyond its work, and the small matrices of grouped KV heads do not fill the cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ...runtime.ops.packed_linear import can_pack, packed_linear
from ..fx_nodes import argument, callee, module_path, shape, value
from ..record import PassRecord, Rejection
from ..traced import TracedGraph

NAME = "pack_linears"


@dataclass(frozen=True)
class PackedInputs:
    """Names of graph inputs that one packed linear reads.

    Attributes:
        weights: to be packed into the first.
        biases: to be joined in the first; as many as weights, or none.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


def pack_linears(traced: TracedGraph) -> PassRecord:
    """Replace linears over parameters. ``traced.notes["packed"]`` lists the ``PackedInputs``.

    A weight or bias that something else reads too (a head tied to the embedding) gets a graph input of its own.
    Flat (paged) graphs only: elsewhere the caller owns the weights.
    """
    record = PassRecord(NAME)
    if not traced.paged:
        return record
    packed: list[PackedInputs] = traced.notes.setdefault("packed", [])
    groups: dict[tuple[object, bool], list[fx.Node]] = {}
    for node in traced.graph.nodes:
        if callee(node) != "linear":
            continue
        reason = _refusal(traced, node)
        if reason:
            record.rejections.append(Rejection(node.name, reason, module_path(node)))
        else:
            key = (argument(node, 0, "input"), argument(node, 2, "bias") is not None)
            groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        packed.append(_replace(traced, nodes))
        record.matches += len(nodes)
    return record


def _refusal(traced: TracedGraph, node: fx.Node) -> str:
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    for parameter in (weight, bias):
        if parameter is not None and (not isinstance(parameter, fx.Node) or parameter.name not in traced.constants):
            return "the weight or bias is computed, not a parameter"
    tensor = value(weight)
    if not isinstance(tensor, torch.Tensor) or len(shape(weight)) != 2:
        return "the weight is no matrix"
    if tensor.device.type != "cpu" or not can_pack(tensor.dtype):
        return f"no packed {tensor.dtype} products on {tensor.device}"
    return ""


def _replace(traced: TracedGraph, nodes: list[fx.Node]) -> PackedInputs:
    """One packed linear in place of linears over the same input, all with a bias or all without."""
    first = nodes[0]
    weights = [_own_input(traced, argument(node, 1, "weight")) for node in nodes]
    biases = [_own_input(traced, bias) for node in nodes if (bias := argument(node, 2, "bias")) is not None]
    with traced.graph.inserting_before(first):
        whole = traced.call(packed_linear, argument(first, 0, "input"), weights, biases)
        whole.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
        start = 0
        for node in nodes:
            size = shape(node)[-1]
            part = traced.method("narrow", whole, -1, start, size) if len(nodes) > 1 else whole
            part.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            node.replace_all_uses_with(part)
            start += size
    for node in nodes:
        traced.graph.erase_node(node)
    return PackedInputs(tuple(w.name for w in weights), tuple(b.name for b in biases))


def _own_input(traced: TracedGraph, parameter: fx.Node) -> fx.Node:
    """The parameter's graph input if one linear alone reads it, else another one that holds the same tensor."""
    if len(parameter.users) == 1:
        return parameter
    name = f"packed_{parameter.name}"
    while name in traced.constants:
        name += "_"
    return traced.add_constant(name, traced.constants[parameter.name])
