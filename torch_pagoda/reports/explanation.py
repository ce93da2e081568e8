"""An explanation of what compiling does to a model: the findings, as text, as tables and as a page."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group

from .findings import Findings
from .page import page
from .tables import tables


@dataclass(repr=False)
class Explanation(Findings):
    """An account of what compiling a model does to it, and what it does not do.

    In a terminal it is a set of tables (``print`` it, or let rich print it in color). Its attributes are those of
    ``Findings``.
    """

    def to_html(self, path: str | os.PathLike[str], layer: int | None = None) -> None:
        """Write the report as one file that needs nothing else: tables, and one decoder layer drawn before and after.

        Args:
            path: file to write.
            layer: index of the layer to draw; by default the first of those with most operators left.

        Raises:
            ValueError: there is no such layer.
        """
        if layer is not None and not 0 <= layer < len(self.layers):
            raise ValueError(f"layer={layer} is not there; {self.model} has {len(self.layers)} decoder layers")
        Path(path).write_text(page(self, layer), encoding="utf-8")

    def __rich__(self) -> Group:
        return Group(*tables(self))

    def __repr__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self)
        return text.getvalue().rstrip()
