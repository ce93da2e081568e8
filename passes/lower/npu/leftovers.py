"""Spell out what no lowering took.

Matches:
    any pagoda:: operator that is left
Becomes:
    the ATen operators of its formula
Why:
    the operators of ours have kernels for CPUs alone.

Level 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ....runtime.ops import gated_activation, layer_norm, moe, rms_norm, rope
from ....runtime.ops.reference import attention_reference
from ...fx_nodes import eliminate_dead_code
from ...record import PassRecord
from ...traced import TracedGraph
from .site import Site

NAME = "spell_out_leftovers"

_pagoda = torch.ops.pagoda

_FORMULAS: dict[Any, Callable[..., Any]] = {
    _pagoda.attention.default: attention_reference,
    _pagoda.moe_gating.default: moe.moe_gating_reference,
    _pagoda.rms_norm.default: rms_norm.rms_norm_reference,
    _pagoda.add_rms_norm.default: rms_norm.add_rms_norm_reference,
    _pagoda.layer_norm.default: layer_norm.layer_norm_reference,
    _pagoda.add_layer_norm.default: layer_norm.add_layer_norm_reference,
    _pagoda.rope.default: rope.rope_reference,
    _pagoda.gated_activation.default: gated_activation.gated_activation_reference,
    _pagoda.activation.default: gated_activation.activation_reference,
}


def spell_out_leftovers(traced: TracedGraph) -> PassRecord:
    """Replace what is left of the canonical operators, so that the graph runs where they are not known.

    Raises:
        ValueError: one whose formula cannot be spelled out.
    """
    record = PassRecord(NAME)
    for node in list(traced.graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "pagoda":
            continue
        if node.target not in _FORMULAS:
            raise ValueError(f"{node.name} ({node.target}) has no form for {traced.npu}")
        site = Site(traced, node, record)
        with traced.before(node):
            results = site.inline(_FORMULAS[node.target], *site.args)
        if isinstance(results, fx.Node):
            traced.substitute(node, results)
        else:
            for user in list(node.users):
                traced.substitute(user, results[user.args[1]])
            traced.graph.erase_node(node)
        site.done()
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record
