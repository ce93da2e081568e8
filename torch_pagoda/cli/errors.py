"""Reports errors of a command: one line on stderr, and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

USER_ERROR = 2
REQUEST_FAILED = 1
OUTPUT_FAILED = 1
INTERRUPTED = 130

_OF_OUTPUT = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Report a user's error as one line on stderr; let every exception through with ``--debug``."""
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if debug or is_of_output(error):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"pagoda: error: {text}", err=True)
        raise typer.Exit(USER_ERROR) from None


def is_of_output(error: BaseException) -> bool:
    """True if writing failed: the reader has closed the pipe, or the disk is full.

    Errors of opening a file name it; those of writing do not.
    """
    return isinstance(error, OSError) and error.errno in _OF_OUTPUT and error.filename is None


def give_up_output(error: OSError) -> None:
    """Report that the output could not be written, and drop its buffered rest.

    Silent if the reader closed the pipe, as ``head`` does.
    """
    if not isinstance(error, BrokenPipeError):
        with suppress(OSError):  # stderr may be full, too
            typer.echo(f"pagoda: error: could not write the output: {error.strerror}", err=True)
    # Or the interpreter would fail once more when it flushes at exit.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
