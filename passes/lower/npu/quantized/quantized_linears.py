"""Products of rounded matrices for Ascend, over weights that are rounded or that a quantized checkpoint stores so.

Matches:
    npu_linear(x, W, b), mm(x, W), addmm(b, x, W)      # parameters; linear(x, W, b) on chips without the first
Becomes:
    q, s = npu_dynamic_quant(x)                        # int8, a scale for each row
    npu_quant_matmul(q, W8, scales, pertoken_scale=s, bias=b, output_dtype=...)    # W8 [in, out], made when linked
    or, where a checkpoint says how inputs are rounded,
    q = npu_quantize(x, scale, offset, qint8, div_mode=True)
    npu_quant_matmul(q, W8, scales * scale, bias=b, output_dtype=...)    # of fp16 with scales as int64
        with an offset, or of fp16, b is int32: in steps of the scales, less offset times the sums of the numbers
    or, of 4 bits in groups of 256 that were made for inputs of 8,
    npu_quant_matmul(q, W4, scales, offset=8 times the sums of the weights, pertoken_scale=s [M, 1],
        output_dtype=..., group_sizes=[0, 0, 256])    # the offset is added for what is taken off the inputs
    or, where inputs keep 16 bits, or those products of 4 bits are not legal,
    npu_weight_quant_batchmatmul(x, W8 or W4, scales, offsets, bias=b, antiquant_group_size=...)
Why it is faster:
    Decoding waits for weights: half or a quarter of the bytes of bf16 take about as much of the time. Prompts wait
    for multiplications, of which the chips do twice as many in int8.

Level 0: when requested (``quantization``), the numbers change. Weights that are stored quantized are served as stored
at every level; inputs in an order of their own are gathered first. Routers are not rounded: choosing another expert
is not a small error. A product that the limits reject, such as a head of more than 65535 tokens, stays in floats, and
the report gives the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from .....runtime.ops.linear.quantized_weight import Quantization, scheme_of
from .....runtime.ops.linear.weight_format import InputScale, WeightFormat
from .....runtime.ops.npu.limits.quantized import INT4_GROUP_SIZES, QINT8
from ....graph.fx_nodes import eliminate_dead_code, shape, value
from ....graph.record import PassRecord
from ....graph.routers import chooses_experts
from ....graph.traced import TracedGraph
from ..linears import sizes_like
from ..site import Site
from .quantized_inputs import QuantizedInputsOf, fitting, why_wide

_aten, _npu = torch.ops.aten, torch.ops.npu
DTYPE_CODES = {torch.bfloat16: 15, torch.float16: 5, torch.float32: 6}
"""As ``output_dtype`` spells them; no chip makes float32, whose limits count it as the dtype that it stands for."""
ROWS = Quantization(8, 0, 8)
"""A scale for each output, and inputs of 8 bits with one for each row."""


class Product(NamedTuple):
    """A product of rows and a parameter.

    Attributes:
        rows: ``[M, in]``; of ``linear`` with more dims in front.
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
    record = PassRecord("quantize_npu_linears")
    if not traced.paged:
        return record
    inputs = QuantizedInputsOf(traced)
    products = _Products(inputs)
    for node in list(traced.graph.nodes):
        product = product_of(node)
        if product is None or (traced.quantization is None and inputs.stored(product.weight) is None):
            continue
        scheme = _scheme_of(traced, inputs, node, product)
        if isinstance(scheme, str):
            record.reject(node, scheme)
            continue
        site = Site(traced, node, record)
        form = inputs.made_for_8_bits(product.weight)
        if form is not None and (why := _why_wide(form)):
            site.refuse("npu.npu_quant_matmul", why)
        with traced.before(node):
            is_linear = node.target is _aten.linear.default
            if is_linear:
                product = product._replace(rows=products.as_matrix(site, product.rows))
            if scheme.input_scale is not None:
                new = products.of_given(site, product, scheme, scheme.input_scale)
            elif scheme.input_bits == 8 and scheme.bits == 4:
                new = products.of_int4(site, product, scheme)
                if new is None:  # the weights stay what they are, and inputs keep 16 bits
                    site.retry()
                    inputs.forget(product.weight)
                    new = products.of_weights(site, product, replace(scheme, input_bits=16, whole_rows=False))
            elif scheme.input_bits == 8:
                new = products.of_int8(site, product, scheme)
            else:
                new = products.of_weights(site, product, scheme)
            if new is not None and is_linear:
                new = traced.call(_aten.reshape.default, new, sizes_like(traced, node, int(shape(node)[-1])))
        if new is None:
            site.leave()
            record.reject(node, "; ".join(why for _, why in site.refused))
        else:
            site.replace(new)
    eliminate_dead_code(traced.graph)
    inputs.close()
    return record


def product_of(node: fx.Node) -> Product | None:
    """The product that a node of a lowered graph is; None for any other node."""
    given: Any = (*node.args, None)
    if node.target is _aten.linear.default and len(shape(given[1])) == 2:
        return Product(given[0], given[1], given[2], False)
    if node.target is _npu.npu_linear.default:
        return Product(given[0], given[1], given[2], False)
    if node.target is _aten.mm.default:
        return Product(given[0], given[1], None, True)
    if node.target is _aten.addmm.default and not node.kwargs:
        return Product(given[1], given[2], given[0], True)
    return None


def _scheme_of(traced: TracedGraph, inputs: QuantizedInputsOf, node: fx.Node, product: Product) -> Quantization | str:
    """How the weight of a product is rounded, or stored; or why it stays one of floats."""
    if not inputs.is_parameter(product.weight):
        return "the weight is computed, not a parameter"
    outputs, width = map(int, shape(product.weight))
    if product.turned:
        outputs, width = width, outputs
    stored, scheme = inputs.stored(product.weight), traced.quantization
    if stored is not None:
        form = stored.form
        if form.code != "int":
            return f"no operator for weights that are stored as {form}"
        scheme = scheme_of(form, 16 if _why_wide(form) else traced.input_bits, stored.input_scale)
    elif chooses_experts(node):
        return "it is a router"
    assert scheme is not None
    if stored is None and scheme.bits < 8 and outputs == shape(traced.output.args[0][0])[-1]:  # type: ignore[index,arg-type]
        scheme = replace(scheme, bits=8, group_size=0)  # the head: its errors go straight into the logits
    return fitting(scheme, width, outputs)


def _why_wide(form: WeightFormat) -> str:
    """As ``why_wide`` says, of linear layers."""
    in_rows = "4 bits with one scale for each output; beside rows of int8 groups of 256 have one"
    return why_wide(form) or (in_rows if form.bits == 4 and not form.group_size else "")


class _Products:
    """Puts products of rounded numbers in the place of those of floats.

    Args:
        inputs: for the weights.
    """

    def __init__(self, inputs: QuantizedInputsOf) -> None:
        self._inputs = inputs
        self._rounded: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self._columns: dict[fx.Node, fx.Node] = {}
        self._given: dict[tuple[fx.Node, InputScale], fx.Node] = {}
        self._whole_biases: dict[fx.Node, tuple[bool, fx.Node | None]] = {}
        self._ordered: dict[tuple[fx.Node, bytes], fx.Node] = {}
        self._matrices: dict[fx.Node, fx.Node] = {}

    def as_matrix(self, site: Site, x: fx.Node) -> fx.Node:
        """``x`` as rows; once for products that share it."""
        if x not in self._matrices:
            self._matrices[x] = site.traced.call(_aten.reshape.default, x, [-1, int(shape(x)[-1])])
        return self._matrices[x]

    def of_int8(self, site: Site, product: Product, scheme: Quantization) -> fx.Node | None:
        """The product of int8; None where it is not legal. Products of the same rows round them once."""
        rows, weight, bias, turned = product
        dtype = value(rows).dtype
        if dtype not in DTYPE_CODES:
            site.refuse("npu.npu_quant_matmul", f"the inputs are {dtype}")
            return None
        rounded = self._rounded_rows(site, rows)
        if rounded is None:
            return None
        made = self._inputs.of(weight, scheme, torch.float32, turned=turned)
        return site.call(
            _npu.npu_quant_matmul.default,
            rounded[0],
            made.numbers,
            made.scales,
            pertoken_scale=rounded[1],
            bias=bias,
            output_dtype=DTYPE_CODES[dtype],
        )

    def of_int4(self, site: Site, product: Product, scheme: Quantization) -> fx.Node | None:
        """The product of int8 and 4 bits in groups; None where it is not legal."""
        rows, weight, bias, turned = product
        dtype = value(rows).dtype
        if dtype not in DTYPE_CODES or bias is not None:
            reason = f"the inputs are {dtype}" if bias is None else "there is no bias beside matrices of 4 bits"
            site.refuse("npu.npu_quant_matmul", reason)
            return None
        rounded = self._rounded_rows(site, rows)
        if rounded is None:
            return None
        made = self._inputs.of(weight, scheme, torch.int64, turned=turned, sums=True)
        if rows not in self._columns:
            self._columns[rows] = site.traced.call(_aten.unsqueeze.default, rounded[1], -1)
        return site.call(
            _npu.npu_quant_matmul.default,
            rounded[0],
            made.numbers,
            made.scales,
            offset=made.sums,
            pertoken_scale=self._columns[rows],
            output_dtype=DTYPE_CODES[dtype],
            group_sizes=list(INT4_GROUP_SIZES),
        )

    def _rounded_rows(self, site: Site, rows: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """``rows`` in int8, and their scales; None where that is not legal. Once for products that share them."""
        if rows not in self._rounded:
            both = site.call(_npu.npu_dynamic_quant.default, rows)
            if both is None:
                return None
            self._rounded[rows] = site.item(both, 0), site.item(both, 1)
        return self._rounded[rows]

    def of_given(self, site: Site, product: Product, scheme: Quantization, input_scale: InputScale) -> fx.Node | None:
        """The product of int8 with inputs whose rounding is given; None where it is not legal."""
        rows, weight, bias, turned = product
        dtype = value(rows).dtype
        is_half = site.target.counted(dtype) is torch.float16
        in_whole = bool(input_scale.offset) or (is_half and bias is not None)
        reason = ""
        if dtype not in DTYPE_CODES:
            reason = f"the inputs are {dtype}"
        elif in_whole and bias is not None and not self._inputs.is_parameter(bias):
            reason = "the bias is computed, not a parameter"
        elif self._whole_biases.setdefault(weight, whole := (in_whole, bias if in_whole else None)) != whole:
            reason = "the weight is read beside another bias, too"
        if reason:
            site.refuse("npu.npu_quant_matmul", reason)
            return None
        if (rows, input_scale) not in self._given:
            rounded = self._rounded_by(site, rows, input_scale)
            if rounded is None:
                return None
            self._given[rows, input_scale] = rounded
        kept = torch.int64 if is_half else torch.float32
        made = self._inputs.of(weight, scheme, kept, turned=turned, bias=bias, whole_bias=in_whole)
        return site.call(
            _npu.npu_quant_matmul.default,
            self._given[rows, input_scale],
            made.numbers,
            made.scales,
            bias=made.whole_bias if in_whole else bias,
            output_dtype=DTYPE_CODES[dtype],
        )

    def _rounded_by(self, site: Site, rows: fx.Node, given: InputScale) -> fx.Node | None:
        """``rows`` in int8 by a scale and an offset; None where it is not legal."""
        constant = site.traced.shared_constant
        step = torch.tensor([given.scale])
        scale = constant(f"input_scale_{int(step.view(torch.int32))}", lambda: step)
        offset = None
        if given.offset:
            whole = torch.tensor([given.offset], dtype=torch.int32)
            offset = constant(f"input_offset_{given.offset & 255}", lambda: whole)
        return site.call(_npu.npu_quantize.default, rows, scale, offset, QINT8, -1, True)

    def of_weights(self, site: Site, product: Product, scheme: Quantization) -> fx.Node | None:
        """The product of 16 bits and a rounded weight; None where it is not legal."""
        rows, weight, bias, turned = product
        dtype, stored = value(rows).dtype, self._inputs.stored(weight)
        if stored is not None and stored.order is not None:
            rows = self._in_order(site, rows, stored.order)
        if bias is not None and site.target.counted(dtype) is torch.bfloat16:
            if not self._inputs.is_parameter(bias):
                site.refuse("npu.npu_weight_quant_batchmatmul", "the bias is computed, not a parameter")
                return None
            bias = self._inputs.wide(bias)
        made = self._inputs.of(weight, scheme, dtype, turned=turned)
        return site.call(
            _npu.npu_weight_quant_batchmatmul.default,
            rows,
            made.numbers,
            made.scales,
            made.offsets,
            None,
            None,
            bias,
            scheme.group_size,
        )

    def _in_order(self, site: Site, rows: fx.Node, order: torch.Tensor) -> fx.Node:
        """``rows`` with their columns in another order; once for products that share both."""
        key = rows, order.numpy().tobytes()
        if key not in self._ordered:
            constant = site.traced.shared_constant(f"order_{rows.name}_{len(self._ordered)}", lambda: order)
            self._ordered[key] = site.aten(_aten.index_select.default, rows, 1, constant)
        return self._ordered[key]
