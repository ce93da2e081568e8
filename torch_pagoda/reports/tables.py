"""Findings as tables for a terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..rendering.terminal import section_tables, styled_text
from .findings import Findings
from .model_sections import heading, sections


def tables(found: Findings) -> list[RenderableType]:
    """A heading and all nonempty sections, in reading order."""
    parts: list[RenderableType] = [_heading(found), ""]
    for section in sections(found):
        parts += section_tables(section)
    return parts


def _heading(found: Findings) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("model", Text(found.model, style="bold"))
    for name, text in heading(found):
        grid.add_row(name, styled_text(text))
    return grid
