"""Regions of a decoder layer that nodes belong to, and their operators that no pass rewrote."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from ..passes import PassRecord
from ..passes.graph.fx_nodes import callee, module_path
from ..passes.graph.provenance import DecoderLayers, frames, launches_work, operator_name, scopes
from .expected import ACTIVATION_MODULE, ACTIVATIONS, ATTENTION_MODULE, GEMMS, NORM_MODULE, ROTARY_FUNCTION

# Products with weights; those of attention scores are batched.
_PROJECTIONS = GEMMS - {"bmm", "baddbmm", "matmul"}
_MLP = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)
_MOE = re.compile(r"experts|router|moe(layer|block)?$|sparse|gate$", re.IGNORECASE)
_ROTARY_MODULE = re.compile(r"rotary|rope", re.IGNORECASE)
UNSAID = "no pass recognized it"
"""The reason if no pass gave one."""
_REGIONS = frozenset({"attention", "norm", "rope", "activation"})
# The part of a pass's name that says what it is about.
_PASSES_FOR = {
    "norm": "norm",
    "rope": "rope",
    "activation": "activation",
    "gated_mlp": "gated_activation",
    "attention": "attention|sdpa|mask",
    "moe": "moe",
}


@dataclass(frozen=True)
class Leftover:
    """An operator that passes should have rewritten and did not.

    Attributes:
        operator: namespace and name.
        module: qualified name of its module.
        region: "attention", "norm", "rope" or "activation".
        layer: index of the decoder layer; -1 outside of all.
        reason: a pass's near miss, or that there is none.
    """

    operator: str
    module: str
    region: str
    layer: int
    reason: str


def region(node: fx.Node) -> str:
    """The part of a model that ``node`` computes.

    "projection", "attention", "norm", "rope", "activation", "moe" (routing and combining; experts count as
    elsewhere), or "" for the rest.
    """
    stack = scopes(node)
    kind = stack[-1].kind if stack else ""
    if callee(node).partition(".")[0] in _PROJECTIONS:
        return "projection"
    if any(ROTARY_FUNCTION.search(frame.function) for frame in frames(node)) or _ROTARY_MODULE.search(kind):
        return "rope"
    if NORM_MODULE.search(kind):
        return "norm"
    if ATTENTION_MODULE.search(kind):
        return "attention"
    if ACTIVATION_MODULE.search(kind) or callee(node).partition(".")[0] in ACTIVATIONS:
        return "activation"
    if _MOE.search(kind):
        return "moe"
    if _MLP.search(kind):
        return "activation"
    return ""


def leftovers(graph: fx.Graph, layers: DecoderLayers, records: Iterable[PassRecord]) -> list[Leftover]:
    """ATen operators left in attention, norms, rotary embeddings and activations.

    Excludes products of projections, and operators outside the layers that run once per step to make rotary tables.

    Args:
        graph: the lowered graph.
        layers: its decoder layers.
        records: reports of the passes, for the reasons.
    """
    found = []
    said = list(records)
    for node in graph.nodes:
        if not launches_work(node) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        part, layer = region(node), layers.of.get(node, -1)
        tables = part == "rope" and layer < 0
        if node.target.namespace == "aten" and part in _REGIONS and not tables:
            module = module_path(node)
            reason = said_about(part, node.name, module, said)
            found.append(Leftover(operator_name(node), module, part, layer, reason))
    return found


def said_about(kind: str, node: str, module: str, records: Iterable[PassRecord]) -> str:
    """The reason of the passes for not rewriting a node or a module.

    The pass for that kind comes first; its reason may also concern a module around this one or inside it.

    Args:
        kind: a region, or one of ``expected.KINDS``.
        node: name of a node; "" if only the module counts.
        module: qualified name.
        records: of all passes.
    """
    about: list[tuple[bool, bool, bool, str]] = []
    for record in records:
        theirs = re.search(_PASSES_FOR[kind], record.name) is not None
        for rejection in record.rejections:
            same_node = bool(node) and rejection.node == node
            same_module = bool(module) and rejection.module == module
            if same_node or same_module or (theirs and _nested(module, rejection.module)):
                about.append((theirs, same_node, same_module, f"{record.name}: {rejection.reason}"))
    return max(about, key=lambda entry: entry[:3])[3] if about else UNSAID


def _nested(one: str, other: str) -> bool:
    """True if one of two modules contains the other."""
    return bool(one and other) and (one.startswith(f"{other}.") or other.startswith(f"{one}."))
