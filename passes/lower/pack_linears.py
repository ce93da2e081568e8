"""Let linear layers read weights that were laid out once for the CPU's matrix kernels.

Matches:
    linear(x, W, b)                      # W a bf16 parameter, the CPU has bf16 instructions
Becomes:
    pagoda::packed_linear(x, W, b)       # W is packed when the program is finished
Why it is faster:
    oneDNN multiplies blocked matrices. A plain weight is re-blocked at every call, which costs a third of the
    bandwidth of a decode step and about a sixth of the arithmetic of a prefill step.
"""

from __future__ import annotations

import torch
from torch import fx

from ...runtime.ops.packed_linear import can_pack, packed_linear
from ..fx_nodes import argument, callee, module_path, shape, value
from ..record import PassRecord, Rejection
from ..traced import TracedGraph

NAME = "pack_linears"


def pack_linears(traced: TracedGraph) -> PassRecord:
    """Replace linears over parameters. ``traced.notes["packed"]`` names the inputs that may be packed.

    A weight that something else reads too (a head tied to the embedding) gets a graph input of its own for the
    packed copy. Flat (paged) graphs only: elsewhere the caller owns the weights.
    """
    record = PassRecord(NAME)
    if not traced.paged:
        return record
    packed: set[str] = traced.notes.setdefault("packed", set())
    inputs: dict[fx.Node, fx.Node] = {}
    for node in list(traced.graph.nodes):
        if callee(node) != "linear":
            continue
        weight = argument(node, 1, "weight")
        reason = _refusal(traced, weight)
        if reason:
            record.rejections.append(Rejection(node.name, reason, module_path(node)))
            continue
        if weight not in inputs:
            inputs[weight] = _own_input(traced, weight)
            packed.add(inputs[weight].name)
        with traced.graph.inserting_before(node):
            new = traced.call(packed_linear, argument(node, 0, "input"), inputs[weight], argument(node, 2, "bias"))
        new.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
        record.matches += 1
    return record


def _refusal(traced: TracedGraph, weight: object) -> str:
    if not isinstance(weight, fx.Node) or weight.name not in traced.constants:
        return "the weight is computed, not a parameter"
    tensor = value(weight)
    if not isinstance(tensor, torch.Tensor) or len(shape(weight)) != 2:
        return "the weight is no matrix"
    if tensor.device.type != "cpu" or not can_pack(tensor.dtype):
        return f"no packed {tensor.dtype} products on {tensor.device}"
    return ""


def _own_input(traced: TracedGraph, weight: fx.Node) -> fx.Node:
    """The weight's graph input if only linears read it, else a second one."""
    if all(callee(u) == "linear" and u.args[0] is not weight for u in weight.users):
        return weight
    return traced.add_constant(f"packed_{weight.name}", traced.constants[weight.name])
