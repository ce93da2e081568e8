"""The numbers at which a function of positions may change: as many tokens must be run to see all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...runtime.ops.linear.stored_weight import StoredWeight
from .evaluate import is_size
from .fx_nodes import callee, is_tensor, value
from .traced import TracedGraph

SMALL_CONSTANT = 120
"""Larger numbers are replaced by smaller ones when they are run, if possible."""
HIDDEN = -1e4
"""Additive masks hide a key with a number below this one."""

_LARGEST = 1 << 40
_AT_ONCE = 1 << 22
"""Entries of a stored tensor."""
_COMPARISONS = frozenset(
    "lt le gt ge eq ne less less_equal greater greater_equal not_equal isin searchsorted".split()
)
_FILLS = frozenset(
    "masked_fill masked_fill_ where full full_like new_full fill_ tensor new_tensor scalar_tensor "
    "mul mul_ imul multiply __mul__ __rmul__".split()
)
_DIVISIONS = frozenset(
    "floordiv ifloordiv floor_divide __floordiv__ rshift __rshift__ bitwise_right_shift floor trunc".split()
)


@dataclass(frozen=True)
class Limits:
    """Numbers above 1, without their signs.

    Attributes:
        literals: of calls, in order; other numbers can replace them.
        fixed: the largest of sizes and of what stored tensors hold.
        table: the longest side of a stored tensor: an index into it may be a limit.
        in_blocks: positions are divided into blocks, and a limit may count these.
    """

    literals: tuple[float, ...]
    fixed: float
    table: int
    in_blocks: bool

    @property
    def large(self) -> tuple[float, ...]:
        """The literals that are not run at their size."""
        return tuple(x for x in self.literals if x > SMALL_CONSTANT)

    @property
    def small(self) -> tuple[float, ...]:
        """The others."""
        return tuple(x for x in self.literals if x <= SMALL_CONSTANT)


def find_limits(traced: TracedGraph, nodes: list[fx.Node]) -> Limits:
    """The limits that may be among all ``nodes`` that something is made of."""
    within = set(nodes)
    literals: set[float] = set()
    fixed: list[float] = []
    tables = [0]
    in_blocks = False
    reach = min(traced.max_positions or _LARGEST, _LARGEST)
    for node in nodes:
        if is_size(node):
            fixed += _of_size(node)
        elif (stored := _stored(traced, node)) is not None:
            if not _counts_places(stored):
                tables += stored.shape
                fixed += _entries(stored, min(reach, -HIDDEN) if _may_fill(node, within) else reach)
        elif is_tensor(node):
            may_fill = callee(node) in _FILLS and _may_fill(node, within)
            literals.update(_possible_limits(_leaves((node.args, node.kwargs)), may_fill))
            in_blocks = in_blocks or callee(node) in _DIVISIONS or "rounding_mode" in node.kwargs
    largest = max((x for x in fixed if x < reach), default=0)
    return Limits(tuple(sorted(literals)), largest, max(tables), in_blocks)


def _leaves(arguments: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(arguments, lambda x: found.append(x))
    return found


def _possible_limits(numbers: Iterable[Any], may_fill: bool) -> Iterator[float]:
    for x in numbers:
        if type(x) not in (int, float) or not 1 < abs(x) < _LARGEST:
            continue
        if not (may_fill and abs(x) >= -HIDDEN):
            yield abs(x)


def _of_size(node: fx.Node) -> list[float]:
    """The integers that a size is computed with."""
    size = value(node)
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return []
    return list(_possible_limits((int(x) for x in size.node.expr.atoms() if x.is_Integer), may_fill=False))


def _stored(traced: TracedGraph, node: fx.Node) -> torch.Tensor | None:
    """The tensor behind an input that always receives the same, or a literal."""
    if node.op == "get_attr":
        found = getattr(traced.module, str(node.target))
        return found if isinstance(found, torch.Tensor) else None
    return traced.constants.get(node.name) if node.op == "placeholder" else None


def _counts_places(stored: torch.Tensor) -> bool:
    """True for a table of positions, in which every entry tells its own place and none is another limit."""
    if stored.dtype is torch.bool or isinstance(stored, StoredWeight) or stored.dim() == 0 or stored.shape[-1] < 2:
        return False
    rows = stored.detach().reshape(-1, stored.shape[-1])
    parts = rows.split(max(1, _AT_ONCE // rows.shape[1]))
    return all(bool((part.diff() == 1).all()) for part in parts) and bool((rows[:, 0].abs() <= SMALL_CONSTANT).all())


def _entries(stored: torch.Tensor, reach: float) -> list[float]:
    """The largest entry below ``reach``."""
    if stored.dtype is torch.bool or isinstance(stored, StoredWeight) or stored.numel() == 0:
        return []
    found = []
    for part in stored.detach().flatten().split(_AT_ONCE):
        sizes = part.abs().double()
        counted = sizes[(sizes > 1) & (sizes < reach)]
        found += [float(counted.max())] if counted.numel() else []
    return [max(found)] if found else []


def _may_fill(node: fx.Node, within: set[fx.Node]) -> bool:
    """True where large numbers of ``node`` may fill what is hidden: floats that reach no comparison."""
    if not is_tensor(node) or not value(node).is_floating_point():
        return False
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for user in current.users:
            if user not in within or user in seen:
                continue
            seen.add(user)
            if callee(user) in _COMPARISONS:
                return False
            if is_tensor(user) and value(user).is_floating_point():
                pending.append(user)
    return True
