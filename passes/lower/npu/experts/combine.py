"""Sums of experts' results with what is added to them, in one operator."""

from __future__ import annotations

import torch
from torch import fx

from ....graph.data_movement import RESHAPES
from ....graph.fx_nodes import callee, eliminate_dead_code, shape, value
from ....graph.traced import TracedGraph

_npu, _aten = torch.ops.npu, torch.ops.aten
_FINALIZE = _npu.npu_moe_finalize_routing.default


def add_while_combining(traced: TracedGraph) -> None:
    """Let npu_moe_finalize_routing add what is added to its result alone, shared experts for instance, as ``skip1``.

    The kernel rounds the whole sum once (op-plugin, golden test ``test_npu_moe_finalize_routing_v2``); the vendor's
    own models call it so (cann-recipes-infer, ``deepseek_v3_2_exp``).
    """
    for node in list(traced.graph.nodes):
        if node.target is not _FINALIZE or node.args[1] is not None:
            continue
        last = node
        while len(last.users) == 1 and callee(reader := next(iter(last.users))) in RESHAPES:
            last = reader
        total = next(iter(last.users)) if len(last.users) == 1 else None
        if total is None or total.target is not _aten.add.Tensor or total.kwargs:
            continue
        other = total.args[1] if total.args[0] is last else total.args[0]
        if not isinstance(other, fx.Node) or other is last or not _alike(other, last):
            continue
        with traced.before(total):
            rows = traced.call(_aten.reshape.default, other, [-1, int(shape(node)[-1])])
            combined = traced.call(_FINALIZE, node.args[0], rows, *node.args[2:], **node.kwargs)
            sizes = [1, -1, int(shape(total)[-1])] if len(shape(total)) == 3 else [-1, int(shape(total)[-1])]
            traced.substitute(total, traced.call(_aten.reshape.default, combined, sizes))
    eliminate_dead_code(traced.graph)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return value(a).dtype is value(b).dtype and str(shape(a)) == str(shape(b))
