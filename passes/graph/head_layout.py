"""Finds the un-repeated, un-transposed tensor behind an attention operand.

Models spell "repeat the KV heads" and "transpose to [heads, tokens, dim]" in a dozen ways. Instead of matching
spellings, the chain of views between an operand and each tensor above it is run on a tensor of element numbers:
what comes out says exactly which element of the base lands where.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .data_movement import CAST_CALLS, REARRANGING_CALLS
from .evaluate import at_sizes, small_sizes
from .fx_nodes import callee, is_tensor, shape, value
from .traced import TracedGraph

if TYPE_CHECKING:
    import sympy

_VIEWS = REARRANGING_CALLS | {"contiguous", "clone", "getitem"}
_CASTS = CAST_CALLS | {"contiguous"}


@dataclass(frozen=True)
class HeadLayout:
    """An operand expressed through its base.

    Attributes:
        base: the tensor that holds every element once.
        permutation: order of the base's dims that gives ``[batch, heads, tokens, dim]``; entries of -1 stand for
            a dim of size 1 that the base does not have.
        heads: number of heads in the base.
        repeats: how often each head appears, adjacent, in the operand.
    """

    base: fx.Node
    permutation: tuple[int, ...]
    heads: int
    repeats: int


def find_layout(operand: fx.Node, *, transposed: bool = False, may_repeat: bool = True) -> HeadLayout | None:
    """Describe an operand of attention, ``[batch, heads, tokens, dim]`` or ``[heads, tokens, dim]``.

    Args:
        operand: q, k or v as it enters the matrix product.
        transposed: the operand's last two dims are swapped (k in ``q @ k.transpose``).
        may_repeat: look for repeated heads (k and v).

    Returns:
        the layout with the fewest elements in its base; among equals one that needs no permutation, then the
        nearest. None when the operand has another rank.
    """
    rank = len(shape(operand))
    if rank not in (3, 4):
        return None
    best: HeadLayout | None = None
    best_cost = (1 << 62, 0)
    for base, chain in _bases(operand):
        sizes = _sizes(operand, base)
        base_shape = at_sizes(tuple(value(base).shape), sizes)
        count = 1
        for s in base_shape:
            count *= s
        if (count, 0) >= best_cost:
            continue
        numbers = torch.arange(count).reshape(base_shape)
        try:
            seen = _run_chain(numbers, base, chain, sizes)
        except Exception:
            break
        layout = _match(base, seen, base_shape, rank, transposed, may_repeat)
        if layout is None:
            continue
        cost = (count, int(layout.permutation != (0, 1, 2, 3)))
        if cost < best_cost:
            best, best_cost = layout, cost
    return best


def insert_layout(traced: TracedGraph, layout: HeadLayout) -> fx.Node:
    """The base as ``[batch, heads, tokens, dim]``; nodes are inserted at the graph's insertion point.

    Views inserted earlier for the same base are used again: layers that share keys share their cache by it.
    """
    node = layout.base
    dims = [d for d in layout.permutation if d >= 0]
    dropped = [d for d in range(len(shape(node))) if d not in dims]
    order = dropped + dims
    if order != sorted(order):
        node = _view(traced, "permute", node, *order)
    for _ in dropped:
        node = _view(traced, "squeeze", node, 0)
    for at, d in enumerate(layout.permutation):
        if d < 0:
            node = _view(traced, "unsqueeze", node, at)
    return node


def _view(traced: TracedGraph, name: str, node: fx.Node, *args: int) -> fx.Node:
    for user in node.users:
        if user.meta.get("layout_view") and user.target == name and user.args[1:] == args:
            return user
    view = traced.method(name, node, *args)
    view.meta["layout_view"] = True
    return view


def _bases(operand: fx.Node) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The operand and what it is a view of, nearest first, each with the views in between."""
    found: list[tuple[fx.Node, list[fx.Node]]] = [(operand, [])]
    node = operand
    chain: list[fx.Node] = []
    while node.op in ("call_function", "call_method") and node.args and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        name = callee(node)
        if not is_tensor(source) or not is_tensor(node):
            break
        same_type = name in _CASTS and value(source).dtype == value(node).dtype
        if name == "getitem" and not _is_basic_index(node.args[1]):
            break
        transposes = name == "getattr" and node.args[1] in ("mT", "T")
        if not (name in _VIEWS or same_type or transposes):
            break
        if name == "to" and not same_type:
            break
        chain = [node, *chain]
        node = source
        found.append((node, chain))
    return found


def _is_basic_index(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(i, fx.Node) and is_tensor(i) for i in items)


def _sizes(operand: fx.Node, base: fx.Node) -> dict[sympy.Symbol, int]:
    sizes = small_sizes(operand)
    for symbol in small_sizes(base):
        sizes.setdefault(symbol, 5 + 2 * len(sizes))
    return sizes


def _run_chain(
    x: torch.Tensor, base: fx.Node, chain: list[fx.Node], sizes: Mapping[sympy.Symbol, int]
) -> torch.Tensor:
    env: dict[fx.Node, Any] = {base: x}
    for node in chain:
        if callee(node) in _CASTS:
            env[node] = env[node.args[0]]  # type: ignore[index]
            continue

        def lookup(n: fx.Node) -> Any:
            return env[n] if n in env else at_sizes(value(n), sizes)

        args, kwargs = fx.map_arg((node.args, node.kwargs), lookup)
        if node.op == "call_method":
            env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return env[chain[-1]] if chain else x


def _match(
    base: fx.Node, seen: torch.Tensor, base_shape: tuple[int, ...], rank: int, transposed: bool, may_repeat: bool
) -> HeadLayout | None:
    if transposed:
        seen = seen.transpose(-1, -2)
    if rank == 3:
        seen = seen.unsqueeze(0)
    heads = seen.shape[1]
    repeats = 1
    if may_repeat:
        for r in range(heads, 0, -1):
            if heads % r == 0 and torch.equal(seen[:, ::r].repeat_interleave(r, 1), seen):
                repeats = r
                break
    seen = seen[:, ::repeats]
    heads //= repeats
    numbers = torch.arange(seen.numel()) if seen.numel() == _count(base_shape) else None
    if numbers is None or len(base_shape) > 5:
        return None
    numbers = numbers.reshape(base_shape)
    wanted = tuple(seen.shape)
    dims = range(len(base_shape))
    for order in itertools.permutations(dims):
        kept = _place(order, base_shape, wanted)
        if kept is None:
            continue
        if torch.equal(numbers.permute(order).reshape(wanted), seen):
            return HeadLayout(base, kept, heads, repeats)
    return None


def _place(order: tuple[int, ...], base_shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """Assign the base's dims, in ``order``, to the wanted four; dims of size 1 may be dropped or made up."""
    placed: list[int] = []
    rest = list(order)
    for size in wanted:
        if size == 1:
            placed.append(rest.pop(0) if rest and base_shape[rest[0]] == 1 else -1)
            continue
        while rest and base_shape[rest[0]] == 1:
            rest.pop(0)
        if not rest or base_shape[rest[0]] != size:
            return None
        placed.append(rest.pop(0))
    if any(base_shape[d] != 1 for d in rest):
        return None
    return tuple(placed)


def _count(sizes: tuple[int, ...]) -> int:
    n = 1
    for s in sizes:
        n *= s
    return n
