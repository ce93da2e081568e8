"""Slices of a stored table to the number of tokens: ``table[:T]``, ``table[:, 2 : T + 2]``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .evaluate import DependsOnData, Evaluation
from .fx_nodes import callee, shape
from .token_dims import token_dims
from .traced import TracedGraph

SIZES = (7, 12)
"""Numbers of tokens at which what does not depend on the tokens is run first."""
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class TableCut:
    """Rows ``offset`` to ``offset + T`` of a table.

    Attributes:
        table: what is cut; it does not depend on the number of tokens.
        dim: of the table, the one that is cut.
        offset: the first row that is taken.
        rows: the numbers of the whole table, the cut dim in front.
    """

    table: fx.Node
    dim: int
    offset: int
    rows: torch.Tensor

    @classmethod
    def of(cls, traced: TracedGraph, node: fx.Node) -> TableCut | None:
        """Find what ``node`` cuts by running it on row numbers instead of the table; None if it is not such a cut."""
        table = node.args[0] if node.args else None
        dims = token_dims(traced, node)
        if callee(node) not in ("getitem", "narrow") or not isinstance(table, fx.Node) or len(dims) != 1:
            return None
        if not shape(table) or token_dims(traced, table):
            return None
        try:
            stored = Evaluation(traced, {})(table)
            for dim, size in enumerate(stored.shape):
                numbers = torch.arange(size).view(-1, *[1] * (stored.dim() - dim - 1)).expand_as(stored)
                offsets = {_first_row(traced, node, {table: numbers}, dims[0], tokens) for tokens in SIZES}
                if len(offsets) == 1 and (offset := offsets.pop()) is not None:
                    return cls(table, dim, offset, stored.movedim(dim, 0))
        except (DependsOnData, RuntimeError):  # a cache; a table of fewer rows
            return None
        return None

    @property
    def is_constant(self) -> bool:
        """All of the table's rows are equal."""
        first = self.rows[:1]
        parts = self.rows.split(_ROWS_AT_ONCE)
        return all(bool(((rows == first) | ((rows != rows) & (first != first))).all()) for rows in parts)


def _first_row(
    traced: TracedGraph, node: fx.Node, given: dict[fx.Node, torch.Tensor], dim: int, tokens: int
) -> int | None:
    """The row that the first token gets, None where the others do not get those behind it."""
    cut = Evaluation(traced, {traced.token_symbol: tokens}, given)(node).movedim(dim, 0)
    if not cut.numel():
        return None
    first = int(cut.flatten()[0])
    expected = torch.arange(first, first + len(cut)).view(-1, *[1] * (cut.dim() - 1))
    return first if bool((cut == expected).all()) else None
