"""Products of int8 matrices for Ascend, over weights that are rounded or that a quantised checkpoint stores so.

Matches:
    npu_linear(x, W, b), mm(x, W), addmm(b, x, W)      # parameters
Becomes:
    q, s = npu_dynamic_quant(x)                        # int8, a scale for each row
    npu_quant_matmul(q, W8, scales, pertoken_scale=s, bias=b, output_dtype=...)    # W8 [in, out], made when linked
Why it is faster:
    Decoding waits for weights: half of the bytes of bf16 take about half of the time. Prompts wait for
    multiplications, of which the chips do twice as many in int8.

Level 0: where asked for (``quantization``) the numbers change, and weights that are stored rounded are served so at
every level. Routers are not rounded, since another expert is no small error. What the limits refuse stays a product
of floats, with the reason: a head of more than 65535 tokens, for instance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ....runtime.ops.quantized_weight import Quantization
from ....runtime.ops.stored_weight import StoredWeight
from ...graph.fx_nodes import eliminate_dead_code, value
from ...graph.record import PassRecord
from ...graph.routers import chooses_experts
from ...graph.traced import TracedGraph
from .quantized_inputs import QuantizedInputsOf
from .site import Site

_aten, _npu = torch.ops.aten, torch.ops.npu
DTYPE_CODES = {torch.bfloat16: 15, torch.float16: 5, torch.float32: 6}
"""As ``output_dtype`` spells them; no chip makes float32, whose limits count it as the dtype that it stands for."""
ROWS = Quantization(8, 0, 8)
"""A scale for each output, and inputs of 8 bits with one for each row."""


class Product(NamedTuple):
    """A product of rows and a parameter.

    Attributes:
        rows: ``[M, in]``.
        weight: ``[out, in]``, or ``[in, out]`` where it is ``turned``.
        bias: ``[out]`` or None.
        turned: see ``weight``.
    """

    rows: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    turned: bool


def quantize_npu_linears(traced: TracedGraph) -> PassRecord:
    """Replace products of floats; ``traced.notes.quantized`` lists the weights. Flat (paged) graphs only: elsewhere
    the caller owns the weights."""
    record = PassRecord("quantise_npu_linears")
    if not traced.paged:
        return record
    inputs = QuantizedInputsOf(traced)
    rounded: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in list(traced.graph.nodes):
        product = product_of(node)
        if product is None or (traced.quantization is None and inputs.stored(product.weight) is None):
            continue
        reason = _refusal(traced, inputs, node, product)
        if reason:
            record.reject(node, reason)
            continue
        site = Site(traced, node, record)
        with traced.before(node):
            new = _rows_of_int8(site, inputs, product, rounded)
        if new is None:
            site.leave()
            record.reject(node, "; ".join(why for _, why in site.refused))
        else:
            site.replace(new)
    inputs.close()
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record


def product_of(node: fx.Node) -> Product | None:
    """The product that a node of a lowered graph is; None for any other node."""
    given: Any = (*node.args, None)
    if node.target is _npu.npu_linear.default:
        return Product(given[0], given[1], given[2], False)
    if node.target is _aten.mm.default:
        return Product(given[0], given[1], None, True)
    if node.target is _aten.addmm.default and not node.kwargs:
        return Product(given[1], given[2], given[0], True)
    return None


def _refusal(traced: TracedGraph, inputs: QuantizedInputsOf, node: fx.Node, product: Product) -> str:
    if not inputs.is_parameter(product.weight):
        return "the weight is computed, not a parameter"
    stored = inputs.stored(product.weight)
    if stored is not None:
        return unreadable(stored)
    return "it is a router" if chooses_experts(node) else ""


def unreadable(stored: StoredWeight) -> str:
    """The reason why Ascend's products do not read weights that are stored so; "" when they do."""
    form = stored.form
    if form.code != "int" or form.bits != 8 or form.group_size or form.zeros or form.ordered or form.input_bits != 8:
        return f"no operator for weights that are stored as {form}"
    return ""


def _rows_of_int8(
    site: Site, inputs: QuantizedInputsOf, product: Product, rounded: dict[fx.Node, tuple[fx.Node, fx.Node]]
) -> fx.Node | None:
    """The product of int8; None where it is not legal. Products of the same rows round them once."""
    rows, weight, bias, turned = product
    dtype = value(rows).dtype
    if dtype not in DTYPE_CODES:
        site.refuse("npu.npu_quant_matmul", f"the inputs are {dtype}")
        return None
    if rows not in rounded:
        both = site.call(_npu.npu_dynamic_quant.default, rows)
        if both is None:
            return None
        rounded[rows] = site.item(both, 0), site.item(both, 1)
    numbers, scales = inputs.of(weight, ROWS, torch.float32, turned=turned, stored=inputs.stored(weight) is not None)
    return site.call(
        _npu.npu_quant_matmul.default,
        rounded[rows][0],
        numbers,
        scales,
        pertoken_scale=rounded[rows][1],
        bias=bias,
        output_dtype=DTYPE_CODES[dtype],
    )
