"""Distinguishes products that select experts: selecting another expert is not a small error."""

from __future__ import annotations

from torch import fx

from .data_movement import RESHAPES
from .fx_nodes import callee

_CHOICES = frozenset(
    "moe_gating topk sort argmax npu_moe_gating_top_k npu_moe_gating_top_k_softmax "
    "npu_moe_gating_top_k_softmax_v2".split()
)
_FORMS = RESHAPES | frozenset("_to_copy softmax _softmax sigmoid add squeeze unsqueeze".split())


def chooses_experts(node: fx.Node) -> bool:
    """Tell whether experts are chosen by the result, perhaps after its form, type or norm has changed."""
    names = {user: callee(user).partition(".")[0] for user in node.users}
    return any(name in _CHOICES or (name in _FORMS and chooses_experts(user)) for user, name in names.items())
