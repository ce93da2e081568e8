"""Sections of a report as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from .fitted_table import FittedTable
from .section import Cell, Section, as_styled, split_marks

_COLORS = {"good": "green", "bad": "red", "warn": "yellow", "strong": "bold", "dim": "dim", "": ""}


def section_tables(section: Section) -> list[RenderableType]:
    """A section for a terminal."""
    table = FittedTable(
        title=section.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    columns = [split_marks(column) for column in section.columns]
    shown = [i for i, (_, marks) in enumerate(columns) if "~" not in marks]
    for i in shown:
        name, marks = columns[i]
        justify: JustifyMethod = "right" if "#" in marks else "left"
        table.add_column(name, justify=justify)
    for row in section.rows:
        table.add_row(*(styled_text(row[i]) for i in shown))
    parts: list[RenderableType] = [table if columns else Text(section.title, style="bold")]
    if len(shown) < len(columns):
        parts += [_long_cells(section, columns[0][0], shown), ""]
    if section.note:
        parts += [Text(section.note, style="dim"), ""]
    return parts


def _long_cells(section: Section, first: str, shown: list[int]) -> Table:
    """The cells too long for the table, each after the row's cell of column ``first``."""
    lists = Table.grid(padding=(0, 2, 0, 0))
    lists.add_column(overflow="fold")
    lists.add_column(overflow="fold")
    for row in section.rows:
        label = as_styled(row[0]).text
        label = f"{first.removesuffix('s')} {label}" if label.isdigit() else label
        for i, cell in enumerate(row):
            if i not in shown and as_styled(cell).text:
                lists.add_row(label, styled_text(cell))
    return lists


def styled_text(cell: Cell) -> Text:
    """A cell in its color."""
    text, style = as_styled(cell)
    return Text(text, style=_COLORS[style])
