"""Rules for norms and rotations: by heads as they are, over the cut dim itself with sums of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from ..graph.cut import ZERO, Cut, Refused
from ..graph.fx_nodes import argument, callee, shape
from .walk import ItemsRule, Rule, Walk


def _norm(walk: Walk, node: fx.Node, cut: Cut) -> None:
    if cut.dim != len(shape(node)) - 1:
        walk.demand(node.args[0], node, cut.dim, cut.indices)
        return
    if callee(node) != "rms_norm":
        raise Refused(f"{callee(node)} runs over what is cut")
    walk.demand(node.args[0], node, cut.dim, cut.indices)
    walk.demand(argument(node, 1, "weight"), node, 0, cut.indices)
    walk.sums.append((node, cut))


def _gated_norm(walk: Walk, node: fx.Node, cut: Cut) -> None:
    source, gate, weight, *_, size = node.args
    walk.works = True
    if cut.dim == len(shape(node)) - 1:
        walk.demand(weight, node, 0, cut.indices)
        if not all(_is_whole_groups(part, int(size)) for part in cut.indices):  # type: ignore[arg-type]
            walk.sums.append((node, cut))
    for operand in (source, gate):
        walk.demand(operand, node, cut.dim, cut.indices)


def _is_whole_groups(part: np.ndarray, size: int) -> bool:
    return len(part) % size == 0 and all(_is_group(group) for group in part.reshape(-1, size))


def _is_group(group: Any) -> bool:
    if (group == ZERO).all():
        return True
    return group[0] % len(group) == 0 and bool((np.diff(group) == 1).all())


def _rope(walk: Walk, node: fx.Node, items: dict[int, Cut]) -> None:
    sources: Any = node.args[0]
    for i, cut in items.items():
        if cut.dim == len(shape(sources[i])) - 1:
            raise Refused("a rotation is cut within a head")
        walk.demand(sources[i], node, cut.dim, cut.indices)
    if len(items) != len(sources):
        raise Refused("a part of a rotation is not read")


NORMS: dict[str, Rule] = {"rms_norm": _norm, "layer_norm": _norm, "gated_rms_norm": _gated_norm}
ROTATIONS: dict[str, ItemsRule] = {"rope": _rope}
