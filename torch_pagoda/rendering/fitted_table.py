"""Tables that fit a narrow terminal: cells are wrapped, not truncated."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED = 100_000


class FittedTable(Table):
    """A table that wraps headers and cells between words if they are too wide, then within words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(width=_UNBOUNDED)
        for column in self.columns:
            column.no_wrap, column.overflow = False, "fold"
        sizes = [
            [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
            for column in self.columns
        ]
        whole = [max(size.maximum for size in column) for column in sizes]
        words = [max(size.minimum for size in column) for column in sizes]
        around = Measurement.get(console, wide, self).maximum - sum(whole)
        widths = fit(whole, words, options.max_width - around)
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)
        for column in self.columns:
            column.width = None


def fit(whole: Sequence[int], words: Sequence[int], room: int) -> list[int]:
    """Column widths that add up to at most ``room``, each at least 1.

    Args:
        whole: widths without wrapping.
        words: widths without breaking words.
        room: total width.
    """
    widths = list(whole)
    for least in (words, [1] * len(widths)):
        while (
            sum(widths) > room and (spare := max((w - m for w, m in zip(widths, least, strict=True)), default=0)) > 0
        ):
            widths[[w - m for w, m in zip(widths, least, strict=True)].index(spare)] -= 1
    return widths
