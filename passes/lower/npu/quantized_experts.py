"""Products of experts in int8 for Ascend, over weights that are rounded or that a quantised checkpoint stores so.

Matches:
    rows, places, counts, _ = npu_moe_init_routing_v2(x, ids, quant_mode=-1)
    h = npu_grouped_matmul([rows], [Up], group_list=counts)              # parameters
    npu_grouped_matmul([act(h)], [Down], group_list=counts)
Becomes:
    rows, places, counts, s = npu_moe_init_routing_v2(x, ids, quant_mode=1)      # int8, a scale for each row
    h = npu_grouped_matmul([rows], [Up8], scale=..., per_token_scale=[s], group_list=counts)
    q, t = npu_dynamic_quant(act(h))
    npu_grouped_matmul([q], [Down8], scale=..., per_token_scale=[t], group_list=counts)
Why it is faster:
    Few tokens reach an expert, so that it waits for its weights: half of the bytes of bf16 take half of the time.

Level 0, as the rounding of linear layers. The rows of all experts fill the products: what the operators leave
undefined behind them, where a chip has some of the experts, is never read. Experts with biases stay, since beside
int8 a bias has to be a whole number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.fx_nodes import callee, eliminate_dead_code, value
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph
from .call import Call
from .limits import violations
from .quantized_inputs import QuantizedInputsOf
from .quantized_linears import DTYPE_CODES, ROWS
from .site import Site

_npu = torch.ops.npu
_ROWS_OF_INT8 = ("int", 8, 0, False, False, 8)


def quantize_npu_experts(traced: TracedGraph) -> PassRecord:
    """Replace products of experts; ``traced.notes.quantized`` lists their weights. Flat (paged) graphs only."""
    record = PassRecord("quantise_npu_experts")
    if not traced.paged:
        return record
    inputs = QuantizedInputsOf(traced)
    for node in list(traced.graph.nodes):
        if node.target is not _npu.npu_grouped_matmul.default or "scale" in node.kwargs:
            continue
        (rows,), (weight,) = node.args[0], node.args[1]  # type: ignore[misc]
        if traced.quantization is None and inputs.stored(weight) is None:
            continue
        reason = _refusal(inputs, weight)
        if reason:
            record.reject(node, reason)
            continue
        site = Site(traced, node, record)
        with traced.before(node):
            new = _product(site, inputs, rows, weight)
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


def _refusal(inputs: QuantizedInputsOf, weight: fx.Node) -> str:
    if not inputs.is_parameter(weight):
        return "the weight is computed, not a parameter"
    stored, asked = inputs.stored(weight), inputs.traced.quantization
    if stored is None:
        rows = asked is not None and (asked.bits, asked.input_bits) == (8, 8)
        return "" if rows else "experts are rounded to 8 bits together with their inputs only"
    form = stored.form
    if (form.code, form.bits, form.group_size, form.zeros, form.ordered, form.input_bits) != _ROWS_OF_INT8:
        return f"no operator for experts that are stored as {form}"
    if inputs.traced.input_bits == 16:
        return "experts of 8 bits take inputs of 8 bits only"
    return "" if stored.transposed else "their scales lie along their inputs"


def _product(site: Site, inputs: QuantizedInputsOf, rows: fx.Node, weight: fx.Node) -> fx.Node | None:
    """The products of int8; None where they are not legal."""
    dtype = value(rows).dtype
    routing: Any = rows.args[0] if callee(rows) == "getitem" else None
    from_routing = routing is not None and routing.target is _npu.npu_moe_init_routing_v2.default
    if dtype not in DTYPE_CODES:
        site.refuse("npu.npu_grouped_matmul", f"the rows are {dtype}")
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
    scale_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    numbers, of_outputs, _ = inputs.of(weight, ROWS, scale_dtype)
    given = {name: found for name, found in site.node.kwargs.items() if name != "bias" or found is not None}
    more = {"scale": [of_outputs], "per_token_scale": [scales], "output_dtype": DTYPE_CODES[dtype]}
    new = site.call(_npu.npu_grouped_matmul.default, [whole], [numbers], **given, **more)
    if new is None and from_routing:
        _set_rounding(site, routing, -1)
    return new


def _rounds(site: Site, routing: fx.Node, rows: fx.Node) -> bool:
    """Let a routing round its rows, if nothing but this product reads them and all of them belong to an expert."""
    experts, most = routing.kwargs.get("expert_num"), int(routing.kwargs.get("active_num", -1))  # type: ignore[arg-type]
    readers = [user for user in routing.users if user.args[1] == 0]
    reason = ""
    if readers != [rows] or set(rows.users) != {site.node}:
        reason = "something else reads the rows, too"
    elif routing.kwargs.get("active_expert_range") != [0, experts] or most > 0:
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
