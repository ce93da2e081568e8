"""Positions for the boxes of a directed graph: ranks from top to bottom, few crossings, short straight arrows.

The steps of Sugiyama, Tagawa and Toda (1981): ranks by longest path, arrows over several ranks cut by dummies,
orders within ranks by barycentres, and positions by least squares under the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 24
_GAP = 28.0
_DUMMY_WIDTH = 10.0


@dataclass(frozen=True)
class Layout:
    """Positions of a graph.

    Attributes:
        rank: row of each box, from the top.
        x: center of each box.
        routes: per arrow, its ``(x, rank)`` points, ends included.
        width: total width, boxes included; the leftmost edge is at 0.
        ranks: number of rows.
    """

    rank: list[int]
    x: list[float]
    routes: list[list[tuple[float, int]]]
    width: float
    ranks: int


def layered(widths: Sequence[float], arrows: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes of the given widths, numbered so that every arrow goes from a lower number to a higher one."""
    count = len(widths)
    rank = _ranks(count, arrows)
    width = list(widths)
    level = list(rank)
    chains = []
    links: list[tuple[int, int]] = []
    for start, end in arrows:
        chain = [start]
        for row in range(rank[start] + 1, rank[end]):
            chain.append(len(width))
            width.append(_DUMMY_WIDTH)
            level.append(row)
        chain.append(end)
        chains.append(chain)
        links += list(pairwise(chain))
    rows: list[list[int]] = [[] for _ in range(max(level, default=-1) + 1)]
    for item, row in enumerate(level):
        rows[row].append(item)
    above: list[list[int]] = [[] for _ in width]
    below: list[list[int]] = [[] for _ in width]
    for upper, lower in links:
        above[lower].append(upper)
        below[upper].append(lower)
    _order(rows, above, below)
    x = _positions(rows, above, below, width, count)
    left = min((x[i] - width[i] / 2 for i in range(len(width))), default=0.0)
    x = [at - left for at in x]
    right = max((x[i] + width[i] / 2 for i in range(len(width))), default=0.0)
    routes = [[(x[i], level[i]) for i in chain] for chain in chains]
    return Layout(rank, x[:count], routes, right, len(rows))


def _ranks(count: int, arrows: Sequence[tuple[int, int]]) -> list[int]:
    """The longest path to each box; boxes without predecessors move down to just above their first reader."""
    rank = [0] * count
    for start, end in sorted(arrows, key=lambda a: a[1]):
        rank[end] = max(rank[end], rank[start] + 1)
    entered = {end for _, end in arrows}
    for box in range(count):
        readers = [rank[end] for start, end in arrows if start == box]
        if box not in entered and readers:
            rank[box] = min(readers) - 1
    return rank


def _order(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sort each row by the mean position of its neighbors, alternately downwards and upwards; keep the best order."""
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(_SWEEPS):
        neighbors = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            place = {item: i for other in rows for i, item in enumerate(other)}
            here = {item: float(i) for i, item in enumerate(row)}
            for item in row:
                if neighbors[item]:
                    here[item] = sum(place[n] for n in neighbors[item]) / len(neighbors[item])
            row.sort(key=here.__getitem__)
        crossings = _crossings(rows, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _crossings(rows: list[list[int]], below: list[list[int]]) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        place = {item: i for i, item in enumerate(lower)}
        ends = [sorted(place[n] for n in below[item] if n in place) for item in upper]
        for i, first in enumerate(ends):
            for second in ends[i + 1 :]:
                total += sum(a > b for a in first for b in second)
    return total


def _positions(
    rows: list[list[int]], above: list[list[int]], below: list[list[int]], width: list[float], boxes: int
) -> list[float]:
    """Move every item toward the mean of its neighbors, without changing the order within rows."""
    x = [0.0] * len(width)
    for row in rows:
        at = 0.0
        for item in row:
            x[item] = at + width[item] / 2
            at += width[item] + _GAP
        for item in row:
            x[item] -= (at - _GAP) / 2
    for sweep in range(_SWEEPS):
        neighbors = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wished, weights = [], []
            for item in row:
                near = neighbors[item] or above[item] or below[item]
                wished.append(sum(x[n] for n in near) / len(near) if near else x[item])
                # Long arrows should be straight: what stands for a part of one yields less.
                weights.append(1.0 if item < boxes else 3.0)
            distances = [(width[a] + width[b]) / 2 + _GAP for a, b in pairwise(row)]
            for item, at in zip(row, _apart(wished, weights, distances), strict=True):
                x[item] = at
    return x


def _apart(wished: list[float], weights: list[float], distances: list[float]) -> list[float]:
    """The positions closest to the desired ones, by weighted squares, with at least ``distances`` between them.

    After subtracting the distances this is isotonic regression, solved by pooling adjacent violators.
    """
    offsets = [0.0]
    for distance in distances:
        offsets.append(offsets[-1] + distance)
    pools: list[list[float]] = []  # mean, weight, count
    for wish, weight, offset in zip(wished, weights, offsets, strict=True):
        pools.append([wish - offset, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, heavy, many = pools.pop()
            total = pools[-1][1] + heavy
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * heavy) / total, total, pools[-1][2] + many]
    means = [mean for mean, _, many in pools for _ in range(int(many))]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]
