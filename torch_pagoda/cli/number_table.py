"""Tables of numbers on a terminal: one column of names, and right-aligned columns of numbers."""

from __future__ import annotations

from rich.table import Table


def number_table(first: str, *numbers: str) -> Table:
    """An empty table without lines: ``first`` heads the names, ``numbers`` the figures."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
