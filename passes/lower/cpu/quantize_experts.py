"""Round the weights of experts to a few bits, or read them as a quantized checkpoint stores them.

Level 0: when requested (``quantization``), the numbers change. Weights that are stored quantized are served as stored
at every level.

Matches:
    pagoda::moe(x, weights, ids, Up, Down, …)        # parameters that nothing else reads
Becomes:
    pagoda::quantized_moe(x, weights, ids, Up, Down, …)     # Up and Down are packed when linked, matrix by matrix
Why it is faster:
    Few tokens reach an expert, so that it waits for its weights: half or a quarter of their bytes take about as much
    of its time.
"""

from __future__ import annotations

from torch import fx

from ....runtime.ops.arguments import MoeArguments
from ....runtime.ops.linear.quantized_weight import LARGEST_INPUTS, Quantization, scheme_of, unpackable
from ....runtime.ops.linear.stored_weight import StoredWeight
from ....runtime.ops.moe.quantized_moe import quantized_moe, scheme_numbers
from ....runtime.ops.native import FLOAT_CODES
from ...graph.fx_nodes import shape, value
from ...graph.packed_weights import PackedWeights
from ...graph.record import PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.traced import TracedGraph


def quantize_experts(traced: TracedGraph) -> PassRecord:
    """Replace mixtures of experts over stored weights, and with ``traced.quantization`` all of them; their weights
    are listed in ``traced.notes.packed``. Stored weights that stay are unpacked when linked."""
    weights = PackedWeights(traced)

    def step(node: fx.Node) -> str | None:
        call: MoeArguments[fx.Node] = MoeArguments(*node.args)
        reason = weights.refusal_of_experts(node)
        tensors = [traced.constants.get(weight.name) for weight in (call.up, call.down)]
        if traced.quantization is None and not any(isinstance(tensor, StoredWeight) for tensor in tensors):
            return None
        if reason:
            return reason
        schemes = []
        for weight, tensor in zip((call.up, call.down), tensors, strict=True):
            scheme = _scheme(tensor, call, traced)
            if isinstance(scheme, str):
                return scheme
            if shape(weight)[1 if call.transposed else 2] > LARGEST_INPUTS:
                return f"sums of {shape(weight)[1 if call.transposed else 2]} products overflow"
            schemes.append(scheme)
        stored = isinstance(tensors[0], StoredWeight)
        out = 2 if call.transposed else 1
        with traced.before(node):
            more = (shape(call.up)[out], shape(call.down)[out], *map(scheme_numbers, schemes))
            new = traced.call(quantized_moe, *call[:-1], *more)
            traced.substitute(node, new)
        for weight, scheme in zip((call.up, call.down), schemes, strict=True):
            weights.note_experts(weight, scheme, stored=stored, transposed=call.transposed)
        return ""

    record = rewrite_each(traced, "quantize_experts", step, weights.experts())
    weights.close()
    return record


def _scheme(tensor: object, call: MoeArguments[fx.Node], traced: TracedGraph) -> Quantization | str:
    """How the weights of experts are packed, or the reason why they are not."""
    if isinstance(tensor, StoredWeight):
        if tensor.form.ordered:
            return "their inputs are stored in a permuted order"
        if tensor.transposed != call.transposed:
            return "their scales are per group of outputs"
        return unpackable(tensor.form) or scheme_of(tensor.form, traced.input_bits)
    if traced.quantization is None:
        return "only one of their weights is quantized"
    weight = value(call.up)
    if weight.device.type != "cpu" or weight.dtype not in FLOAT_CODES:
        return f"no quantized products of {weight.dtype} on {weight.device}"
    return traced.quantization
