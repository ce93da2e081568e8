"""Cuts: of one dim of a tensor, the indices that each rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = tuple[NDArray[np.int64], ...]
"""Per rank, indices of a dim in the order in which the rank holds them, as many on every rank; -1 is a zero."""
Runs = tuple[tuple[tuple[int, int], ...], ...]
ZERO = -1


class Refused(Exception):
    """A part of a graph that cannot be cut as it was tried. The message is the reason, one line for a person.

    Attributes:
        unit: the cut would do with whole multiples of so many indices; 1 where that is not known.
        heads: the cut would do if it followed the groups of ``(query heads, KV heads)``; None: that is not known.
        gathers: it is a weight whose inputs cannot be parted; its outputs can.
    """

    def __init__(
        self, reason: str, *, unit: int = 1, heads: tuple[int, int] | None = None, gathers: bool = False
    ) -> None:
        super().__init__(reason)
        self.unit, self.heads, self.gathers = unit, heads, gathers


@dataclass(frozen=True, eq=False)
class Cut:
    """The part of a tensor that each rank holds.

    Attributes:
        dim: that is cut.
        indices: of it, per rank; see ``Indices``.
        further: the cut of another dim; None: this one alone is cut.
    """

    dim: int
    indices: Indices
    further: Cut | None = None

    @property
    def local(self) -> int:
        """Size of the dim on every rank."""
        return len(self.indices[0])

    def each(self) -> Iterator[Cut]:
        """This cut and the further ones."""
        yield self
        if self.further is not None:
            yield from self.further.each()

    @property
    def runs(self) -> Runs:
        """Its indices as plain data: per rank, the first and the number of each run; -1 is the first of zeros."""
        return tuple(tuple(_runs(part)) for part in self.indices)

    @classmethod
    def of_runs(cls, dim: int, runs: Runs, size: int) -> Cut:
        """The cut that plain data describe.

        Args:
            dim: that is cut.
            runs: as ``runs`` gives them.
            size: of the dim.

        Raises:
            ValueError: ranks hold different numbers of indices, or such as the dim does not have.
        """
        parts = []
        for part in runs:
            if any(count < 1 or (first != ZERO and not 0 <= first <= size - count) for first, count in part):
                raise ValueError(f"{part} are no runs of {size} indices")
            filled = [np.full(n, ZERO) if first == ZERO else np.arange(first, first + n) for first, n in part]
            parts.append(np.concatenate([np.empty(0), *filled]).astype(np.int64))
        if len({len(part) for part in parts}) != 1:
            raise ValueError(f"ranks hold {', '.join(str(len(part)) for part in parts)} indices, which differ")
        return cls(dim, tuple(parts))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Cut)
            and (self.dim, self.further) == (other.dim, other.further)
            and all(map(np.array_equal, self.indices, other.indices))
        )

    def __hash__(self) -> int:
        return hash((self.dim, self.further, *(part.tobytes() for part in self.indices)))


def _runs(part: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    start = 0
    for end in range(1, len(part) + 1):
        goes_on = end < len(part) and (part[end] == part[end - 1] + 1 if part[start] != ZERO else part[end] == ZERO)
        if not goes_on or (part[start] != ZERO and part[end] == ZERO):
            yield int(part[start]), end - start
            start = end


def deal(size: int, unit: int, ranks: int) -> Indices:
    """Indices of a dim in contiguous runs of whole units, padded with zeros to equal sizes.

    Args:
        size: of the dim.
        unit: indices that stay together; the last unit may be smaller.
        ranks: number of them.
    """
    share = -(-math.ceil(size / unit) // ranks) * unit
    return tuple(_padded(np.arange(min(r * share, size), min((r + 1) * share, size)), share) for r in range(ranks))


def deal_heads(heads: int, kv_heads: int, head_dim: int, ranks: int) -> Indices:
    """Columns of attention's result ``[heads * head_dim]``: every rank holds whole groups of one KV head, or a part
    of one group, padded with zero heads to equal numbers."""
    group = heads // kv_heads
    if kv_heads >= ranks:
        return deal(heads * head_dim, group * head_dim, ranks)
    owner = [r * kv_heads // ranks for r in range(ranks)]
    share = max(math.ceil(group / owner.count(kv)) for kv in range(kv_heads)) * head_dim
    parts = []
    for r, kv in enumerate(owner):
        first = kv * group * head_dim + (r - owner.index(kv)) * share
        last = min(first + share, (kv + 1) * group * head_dim)
        parts.append(_padded(np.arange(first, max(first, last)), share))
    return tuple(parts)


def counted_once(cut: Cut) -> Cut:
    """A cut of the first dim with zeros for what an earlier rank holds, too: every index counts on one rank."""
    seen: set[int] = set()
    parts = []
    for part in cut.indices:
        parts.append(np.array([ZERO if i in seen else i for i in part.tolist()], dtype=np.int64))
        seen.update(part.tolist())
    return Cut(0, tuple(parts))


def first_only(size: int, ranks: int) -> Indices:
    """All indices on rank 0, zeros on the others: what is added once."""
    return (np.arange(size), *(np.full(size, ZERO) for _ in range(ranks - 1)))


def in_order(indices: Indices, size: int) -> bool:
    """True if the ranks hold all indices of a dim, one after the other's."""
    return np.array_equal(np.concatenate(indices), np.arange(size))


def shifted(indices: Indices, by: int) -> Indices:
    """The same places in a larger dim, in which they begin at ``by``."""
    return tuple(np.where(part == ZERO, ZERO, part + by) for part in indices)


def within(indices: Indices, first: int, size: int) -> Indices:
    """Those of ``size`` indices from ``first`` on, counted from there.

    Raises:
        Refused: ranks hold different numbers of them, or zeros whose place is not known.
    """
    found = tuple(part[(part >= first) & (part < first + size)] - first for part in indices)
    if len({len(part) for part in found}) != 1 or any((part == ZERO).any() for part in indices):
        raise Refused("pieces that are joined are not held in equal parts")
    return found


def groups_read(indices: Indices, many: int, few: int) -> Indices:
    """The few heads that the many read, where head ``i`` reads head ``i // (many / few)``, here as on one device.

    Raises:
        Refused: no rank-local grouping of that kind exists.
    """
    per_group, local = many // few, len(indices[0])
    for count in (count for count in range(1, local + 1) if local % count == 0):
        slots = [np.where(part == ZERO, ZERO, part // per_group).reshape(count, -1) for part in indices]
        if all(_is_one(row) for slot in slots for row in slot):
            return tuple(slot.max(axis=1) for slot in slots)
    raise Refused(f"{many} heads that read {few} are not held in whole groups", heads=(many, few))


def _is_one(row: NDArray[np.int64]) -> bool:
    return len(set(row.tolist()) - {ZERO}) <= 1


def _padded(indices: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.concatenate([indices, np.full(size - len(indices), ZERO)]).astype(np.int64)


def through_view(source: Sequence[Any], result: Sequence[Any], cut: Cut) -> Cut:
    """The cut of a tensor of ``source`` sizes whose view of ``result`` sizes is cut.

    Args:
        source, result: static sizes are ints; others are compared by their text.
        cut: of the view.

    Raises:
        Refused: no cut of one dim is the same.
    """
    for before, after in _matched(list(source), list(result)):
        if cut.dim not in after:
            continue
        sizes, sizes_after = [source[i] for i in before], [result[i] for i in after]
        if sizes == sizes_after:
            return Cut(before[after.index(cut.dim)], cut.indices)
        for place, dim in sorted(enumerate(before), key=lambda entry: sizes[entry[0]] == 1):
            found = [_along(sizes, place, sizes_after, after.index(cut.dim), part) for part in cut.indices]
            if all(part is not None for part in found):
                return Cut(dim, tuple(part for part in found if part is not None))
        inner = [size for size in sizes if size != 1][1:]
        unit = math.prod(inner) if sum(size != 1 for size in sizes_after) == 1 else 1
        raise Refused(f"a view of {sizes} as {sizes_after} has no cut like it", unit=unit)
    raise Refused("a view mixes tokens and what is cut")


def _along(
    sizes: list[int], place: int, after: list[int], dim: int, held: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Indices of dim ``place`` of ``sizes`` that hold what ``held`` of dim ``dim`` of ``after`` does; None: there are
    none."""
    table = np.moveaxis(np.arange(math.prod(after)).reshape(after), dim, 0)
    wanted = np.where((held == ZERO).reshape(-1, *[1] * (table.ndim - 1)), ZERO, table[held])
    wanted = np.moveaxis(wanted, 0, dim).ravel()
    others = math.prod(sizes) // sizes[place]
    if len(wanted) % others:
        return None
    local = [*sizes]
    local[place] = len(wanted) // others
    rows = np.moveaxis(wanted.reshape(local), place, 0).reshape(local[place], -1)
    table = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), place, 0).reshape(sizes[place], -1)
    first = np.unravel_index(np.maximum(rows[:, 0], 0), sizes)[place]
    alike = np.where(rows[:, :1] == ZERO, rows == ZERO, table[first] == rows)
    return np.where(rows[:, 0] == ZERO, ZERO, first) if alike.all() else None


def _matched(source: list[Any], result: list[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Dims of two shapes in runs of equal products; a size that varies stands for itself.

    Raises:
        Refused: a static size is mixed with one that varies.
    """
    stretches, others = _stretches(source), _stretches(result)
    if [str(size) for size in source if not isinstance(size, int)] != [
        str(s) for s in result if not isinstance(s, int)
    ]:
        raise Refused("a view mixes tokens and what is cut")
    for before, after in zip(stretches, others, strict=True):
        i = j = 0
        while i < len(before) or j < len(after):
            first, other, left, right = i, j, 1, 1
            while left != right or (i == first and j == other):
                if i < len(before) and (left <= right or j == len(after)):
                    left, i = left * source[before[i]], i + 1
                elif j < len(after):
                    right, j = right * result[after[j]], j + 1
                else:
                    raise Refused("a view mixes tokens and what is cut")
            rest = (before[i:], source), (after[j:], result)
            if all(sizes[dim] == 1 for dims, sizes in rest for dim in dims):
                i, j = len(before), len(after)
            yield before[first:i], after[other:j]


def _stretches(sizes: list[Any]) -> list[list[int]]:
    """Dims between those that vary."""
    found: list[list[int]] = [[]]
    for dim, size in enumerate(sizes):
        if isinstance(size, int):
            found[-1].append(dim)
        else:
            found.append([])
    return found
