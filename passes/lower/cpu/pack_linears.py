"""Let linear layers read weights that were laid out once for the CPU's matrix kernels.

Level 0, when requested (``pack_weights``): plain bf16 matrices are multiplied as well, in another order.

Matches:
    linear(x, W, b), linear(x, t(W), b)      # bf16 parameters
Becomes:
    pagoda::packed_linear(x, W, b)           # W is packed when the program is finished
Why it is faster:
    oneDNN multiplies blocked matrices. A plain weight is re-blocked at every call, which costs a third of the
    bandwidth of a decode step and about a sixth of the arithmetic of a prefill step. A few rows are multiplied by a
    kernel of ours that reads the blocks a tenth to a fifth faster than oneDNN. Where the processor has no bf16
    products torch multiplies one number at a time; that kernel widens the blocks in registers.
"""

from __future__ import annotations

from torch import fx

from ....runtime.ops.linear.packed_linear import can_pack, packed_linear
from ...graph.fx_nodes import argument, value
from ...graph.packed_weights import PackedWeights
from ...graph.record import PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.traced import TracedGraph


def pack_linears(traced: TracedGraph) -> PassRecord:
    """Replace linears over parameters. ``traced.notes.packed`` lists their weights.

    Flat (paged) graphs only: elsewhere the caller owns the weights.
    """
    weights = PackedWeights(traced)

    def step(node: fx.Node) -> str | None:
        reason = weights.refusal(node) or _refusal(node)
        if reason:
            return reason
        x, bias = argument(node, 0, "input"), argument(node, 2, "bias")
        with traced.before(node):
            traced.substitute(node, traced.call(packed_linear, x, weights.input_for(node), bias))
        return ""

    record = rewrite_each(traced, "pack_linears", step, weights.linears())
    weights.close()
    return record


def _refusal(node: fx.Node) -> str:
    weight = value(argument(node, 1, "weight"))
    if weight.device.type != "cpu" or not can_pack(weight.dtype):
        return f"no packed {weight.dtype} products on {weight.device}"
    return ""
