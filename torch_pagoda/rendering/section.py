"""A section of a report: a table for both a terminal and a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

_MARKS = "#!`~"


class Styled(NamedTuple):
    """Emphasized text.

    Attributes:
        text: the text.
        style: "good", "bad", "warn", "strong" or "dim"; "" for none.
    """

    text: str
    style: str


Cell: TypeAlias = "str | Styled"


@dataclass(frozen=True)
class Section:
    """A table with a heading.

    Attributes:
        title: heading.
        columns: names, with trailing marks: ``#``: numbers; ``!``: cells never wrap; backtick: code; ``~``: cells are
            so long that a terminal lists them below the table.
        rows: cells; a page writes line breaks as one line.
        note: a sentence or two; "" for none.
        hint: the same for the page only, which has room.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    hint: str = ""


def split_marks(column: str) -> tuple[str, str]:
    """Name and marks of a column."""
    name = column.rstrip(_MARKS)
    return name, column[len(name) :]


def as_styled(cell: Cell) -> Styled:
    """A cell with its style."""
    return Styled(cell, "") if isinstance(cell, str) else cell
