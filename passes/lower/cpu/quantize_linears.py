"""Round the weights of linear layers to a few bits, and their inputs to 8 or 16.

Level 0, when requested (``quantization``): the numbers change.

Matches:
    linear(x, W, b), linear(x, t(W), b)              # parameters
Becomes:
    pagoda::quantized_linear(x, W, b, out, bits, group_size, input_bits)       # W is rounded when linked
Why it is faster:
    Decoding waits for weights: half or a quarter of the bytes of bf16 take about as much of its time. Long prompts
    and big batches wait for multiplications, of which a CPU does twice as many in int8 as in bf16.

The head of a 4-bit model keeps 8 bits: its errors go straight into the logits. Routers are not rounded: choosing
another expert is not a small error.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ....runtime.ops.linear.quantized_linear import quantized_linear
from ....runtime.ops.linear.quantized_weight import DEFAULT_GROUP_SIZES, LARGEST_INPUTS
from ....runtime.ops.native import FLOAT_CODES
from ...graph.fx_nodes import argument, shape, value
from ...graph.packed_weights import PackedWeights
from ...graph.record import PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.routers import chooses_experts
from ...graph.traced import TracedGraph

_HEAD_GROUP = DEFAULT_GROUP_SIZES[8]


def quantize_linears(traced: TracedGraph) -> PassRecord:
    """Replace linears over parameters, as ``traced.quantization`` says; ``traced.notes.packed`` lists the weights.

    Flat (paged) graphs only: elsewhere the caller owns the weights.
    """
    scheme = traced.quantization
    if scheme is None or not traced.paged:
        return PassRecord("quantize_linears")
    weights = PackedWeights(traced)
    vocab_size = shape(traced.output.args[0][0])[-1]  # type: ignore[index,arg-type]

    def step(node: fx.Node) -> str | None:
        reason = weights.refusal(node) or _refusal(node)
        if reason:
            return reason
        x, bias = argument(node, 0, "input"), argument(node, 2, "bias")
        outputs = shape(argument(node, 1, "weight"))[0]
        is_head = outputs == vocab_size and scheme.bits < 8
        chosen = replace(scheme, bits=8, group_size=_HEAD_GROUP) if is_head else scheme
        given = (outputs, chosen.bits, chosen.group_size, chosen.input_bits)
        with traced.before(node):
            new = traced.call(quantized_linear, x, weights.input_for(node, chosen), bias, *given)
            traced.substitute(node, new)
        return ""

    record = rewrite_each(traced, "quantize_linears", step, weights.linears())
    weights.close()
    return record


def _refusal(node: fx.Node) -> str:
    weight = value(argument(node, 1, "weight"))
    if weight.device.type != "cpu" or weight.dtype not in FLOAT_CODES:
        return f"no quantized products of {weight.dtype} on {weight.device}"
    if weight.shape[1] > LARGEST_INPUTS:
        return f"sums of {weight.shape[1]} products overflow"
    return "it is a router" if chooses_experts(node) else ""
