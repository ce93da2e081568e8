"""Products of experts over rounded matrices for Ascend: rounded here, or stored so by a quantized checkpoint.

Matches:
    rows, row_idx, counts, _ = npu_moe_init_routing_v2(x, ids, quant_mode=-1)
    h = npu_grouped_matmul([rows], [Up], group_list=counts)              # parameters
    npu_grouped_matmul([act(h)], [Down], group_list=counts)
Becomes:
    where inputs are rounded to 8 bits
    rows, row_idx, counts, s = npu_moe_init_routing_v2(x, ids, quant_mode=1)     # int8, a scale for each row
    h = npu_grouped_matmul([rows], [Up8], scale=..., per_token_scale=[s], group_list=counts)
    q, t = npu_dynamic_quant(act(h))
    npu_grouped_matmul([q], [Down8], scale=..., per_token_scale=[t], group_list=counts)
        of 4 bits with bias=[8 times the sums of the weights], which the operator adds for what it takes off the rows
    or, where inputs keep 16 bits, or stored matrices have zeros, or groups that those do not take
    npu_grouped_matmul([rows], [Up8 or Up4], antiquant_scale=..., antiquant_offset=..., group_list=counts)
Why it is faster:
    Few tokens reach an expert, so that it waits for its weights: half or a quarter of the bytes of bf16 take about as
    much of the time.

Level 0, as the rounding of linear layers. What the operators leave undefined behind the rows of the experts, where a
rank has some of them, is never added. With int8 rows, experts with biases stay
as they are: a bias would have to be an integer, or take the argument that holds the sums of 4-bit weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .....runtime.ops.linear.quantized_weight import Quantization, scheme_of
from .....runtime.ops.npu.limits import violations
from ....graph.fx_nodes import callee, eliminate_dead_code, shape, value
from ....graph.record import PassRecord
from ....graph.traced import TracedGraph
from ..call import Call
from ..quantized.quantized_inputs import QuantizedInputsOf, fitting, why_wide
from ..quantized.quantized_linears import DTYPE_CODES
from ..site import Site

_npu = torch.ops.npu


def quantize_npu_experts(traced: TracedGraph) -> PassRecord:
    """Replace products of experts; ``traced.notes.quantized`` lists their weights. Flat (paged) graphs only."""
    record = PassRecord("quantize_npu_experts")
    if not traced.paged:
        return record
    inputs = QuantizedInputsOf(traced)
    for node in list(traced.graph.nodes):
        if node.target is not _npu.npu_grouped_matmul.default or {"scale", "antiquant_scale"} & node.kwargs.keys():
            continue
        (rows,), (weight,) = node.args[0], node.args[1]  # type: ignore[misc]
        if traced.quantization is None and inputs.stored(weight) is None:
            continue
        scheme = _scheme_of(inputs, weight)
        if isinstance(scheme, str):
            record.reject(node, scheme)
            continue
        site = Site(traced, node, record)
        form = inputs.made_for_8_bits(weight)
        if form is not None and (why := why_wide(form)):
            site.refuse("npu.npu_grouped_matmul", why)
        with traced.before(node):
            make = _of_int8 if scheme.input_bits == 8 else _of_weights
            new = make(site, inputs, rows, weight, scheme)
            if new is None and scheme.whole_rows:  # the weights stay what they are, and inputs keep 16 bits
                site.retry()
                inputs.forget(weight)
                wide = replace(scheme, input_bits=16, whole_rows=False)
                new = _of_weights(site, inputs, rows, weight, wide)
        if new is None:
            site.leave()
            record.reject(node, "; ".join(why for _, why in site.refused))
            continue
        node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
        site.done()
    inputs.close()
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record


def _scheme_of(inputs: QuantizedInputsOf, weight: fx.Node) -> Quantization | str:
    """How the matrices of experts are rounded, or stored; or why they stay floats."""
    if not inputs.is_parameter(weight):
        return "the weight is computed, not a parameter"
    stored, scheme = inputs.stored(weight), inputs.traced.quantization
    if stored is not None:
        form = stored.form
        if form.code != "int":
            return f"no operator for experts that are stored as {form}"
        if form.ordered:
            return "their inputs are stored in an order of their own"
        if not stored.transposed:
            return "their scales lie along their inputs"
        scheme = scheme_of(form, 16 if why_wide(form) else inputs.traced.input_bits)
    assert scheme is not None
    _, width, outputs = map(int, shape(weight))
    found = fitting(scheme, width, outputs)
    if isinstance(found, Quantization) and found.group_size and width % found.group_size:
        return f"groups of {found.group_size} do not divide {width} inputs, which the operator splits evenly"
    return found


def _of_int8(
    site: Site, inputs: QuantizedInputsOf, rows: fx.Node, weight: fx.Node, scheme: Quantization
) -> fx.Node | None:
    """The products of rows of int8; None where they are not legal."""
    dtype = value(rows).dtype
    routing: Any = rows.args[0] if callee(rows) == "getitem" else None
    from_routing = routing is not None and routing.target is _npu.npu_moe_init_routing_v2.default
    reason = ""
    if dtype not in DTYPE_CODES:
        reason = f"the rows are {dtype}"
    elif scheme.bits == 4 and site.node.kwargs.get("bias") is not None:
        reason = "they have a bias, in whose place matrices of 4 bits have their sums"
    if reason:
        site.refuse("npu.npu_grouped_matmul", reason)
        return None
    if from_routing and not _rounds(site, routing, rows):
        return None
    if from_routing:
        whole, scales = rows, site.item(routing, 3)
    else:
        both = site.call(_npu.npu_dynamic_quant.default, rows)
        if both is None:
            return None
        whole, scales = site.item(both, 0), site.item(both, 1)
    given = {name: found for name, found in site.node.kwargs.items() if name != "bias" or found is not None}
    more = {"per_token_scale": [scales], "output_dtype": DTYPE_CODES[dtype]}
    if scheme.bits == 4:
        made = inputs.of(weight, scheme, torch.int64, sums=True)
        more |= {"scale": [made.scales], "bias": [made.sums]}
    else:
        scale_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
        made = inputs.of(weight, scheme, scale_dtype)
        more |= {"scale": [made.scales]}
    new = site.call(_npu.npu_grouped_matmul.default, [whole], [made.numbers], **{**given, **more})
    if new is None and from_routing:
        _set_rounding(site, routing, -1)
    return new


def _of_weights(
    site: Site, inputs: QuantizedInputsOf, rows: fx.Node, weight: fx.Node, scheme: Quantization
) -> fx.Node | None:
    """The products of rows of 16 bits and rounded matrices; None where they are not legal."""
    made = inputs.of(weight, scheme, value(rows).dtype, offsets=True)
    more = {"antiquant_scale": [made.scales], "antiquant_offset": [made.offsets]}
    return site.call(_npu.npu_grouped_matmul.default, [rows], [made.numbers], **{**site.node.kwargs, **more})


def _rounds(site: Site, routing: fx.Node, rows: fx.Node) -> bool:
    """Let a routing round its rows, if nothing but this product reads them and all of them are there."""
    most = int(routing.kwargs.get("active_num", -1))  # type: ignore[arg-type]
    readers = [user for user in routing.users if user.args[1] == 0]
    reason = ""
    if readers != [rows] or set(rows.users) != {site.node}:
        reason = "something else reads the rows, too"
    elif most > 0:
        reason = "some rows belong to no expert"
    else:
        made = {**routing.kwargs, "quant_mode": 1}
        reason = "; ".join(violations(Call.make(routing.target, site.target, *routing.args, **made)))  # type: ignore[arg-type]
    if reason:
        site.refuse("npu.npu_moe_init_routing_v2", reason)
        return False
    _set_rounding(site, routing, 1)
    return True


def _set_rounding(site: Site, routing: fx.Node, mode: int) -> None:
    routing.kwargs = {**routing.kwargs, "quant_mode": mode}
    site.traced.propagate(routing)
    for user in routing.users:
        site.traced.propagate(user)
