"""Reading by linear layers of weights as a quantized checkpoint stores them.

Matches:
    linear(x, W, b), linear(x, t(W), b)              # W is a StoredWeight of a format that the kernel reads
Becomes:
    pagoda::quantized_linear(x, W, b, out, bits, group_size, 16, zeros, order)   # W is laid out when linked
    pagoda::quantized_linear(x, W, b, out, 8, 0, 8, zeros, order)                # made for inputs of 8 bits
    pagoda::quantized_linear(x, W, b, out, 8, 0, 8, zeros, order, "int", scale, offset)     # whose rounding is given
    pagoda::quantized_linear(x, W, b, out, 8, group_size, 0, False, order, "e4m3")     # of floats of 8 bits
Why it is faster:
    Decoding waits for weights: half or a quarter of the bytes of bf16 take about as much of its time.

Level 0: the codes and scales are the checkpoint's, so that its model is served at every level. Inputs keep 16 bits,
as the model keeps them, or all: a checkpoint whose weights alone are rounded must not lose more. Those of weights
that were made for inputs of 8 bits are rounded to these, row by row or as the checkpoint says, unless
``input_bits=16`` is requested.
"""

from __future__ import annotations

from torch import fx

from ....runtime.ops.linear.quantized_linear import quantized_linear
from ....runtime.ops.linear.quantized_weight import LARGEST_INPUTS, scheme_of, unpackable
from ...graph.fx_nodes import argument, shape
from ...graph.packed_weights import PackedWeights
from ...graph.record import PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.traced import TracedGraph


def stored_linears(traced: TracedGraph) -> PassRecord:
    """Replace linears over stored weights; ``traced.notes.packed`` lists these. Others are unpacked when linked."""
    weights = PackedWeights(traced)

    def step(node: fx.Node) -> str | None:
        stored = weights.stored(node)
        if stored is None:
            return None
        reason = weights.refusal(node) or unpackable(stored.form)
        if not reason and stored.form.code != "e4m3" and stored.shape[-1] > LARGEST_INPUTS:
            reason = f"sums of {stored.shape[-1]} products overflow"
        if reason:
            return reason
        scheme = scheme_of(stored.form, traced.input_bits, stored.input_scale)
        x, bias = argument(node, 0, "input"), argument(node, 2, "bias")
        outputs = shape(argument(node, 1, "weight"))[0]
        with traced.before(node):
            packed = weights.input_for(node, scheme, stored=True)
            order = None if stored.order is None else traced.add_constant(f"order_{packed.name}", stored.order)
            given = (outputs, *scheme.arguments(order))
            traced.substitute(node, traced.call(quantized_linear, x, packed, bias, *given))
        return ""

    record = rewrite_each(traced, "stored_linears", step, weights.linears())
    weights.close()
    return record
