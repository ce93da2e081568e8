"""How a command reports what went wrong: one line on stderr, and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

USER_ERROR = 2
REQUEST_FAILED = 1
INTERRUPTED = 130


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Report what a user can mend as one line on stderr; let everything through when debugging."""
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if debug or isinstance(error, BrokenPipeError):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"pagoda: error: {text}", err=True)
        raise typer.Exit(USER_ERROR) from None
