"""Help texts of the commands, written for the width of the terminal and not for that of the source."""

from __future__ import annotations

import inspect
from typing import Any


def join_lines(command: Any) -> None:
    """Make each paragraph of a command's help, and of the commands below it, one line, which typer wraps to fit.

    Typer joins the lines of the first paragraph only and breaks the others where the docstring is broken.

    Args:
        command: a click command; a group's own are changed, too.
    """
    if command.help:
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for inner in getattr(command, "commands", {}).values():
        join_lines(inner)
