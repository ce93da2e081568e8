"""Help texts of the commands, wrapped to the width of the terminal."""

from __future__ import annotations

import inspect
from typing import Any


def join_lines(command: Any) -> None:
    """Join each paragraph of a command's help, and of its subcommands', to one line, which typer wraps.

    Typer joins the lines of the first paragraph only and keeps the docstring's line breaks in the others.

    Args:
        command: a click command; a group's subcommands are changed, too.
    """
    if command.help:
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for inner in getattr(command, "commands", {}).values():
        join_lines(inner)
