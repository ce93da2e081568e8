"""Phases of compiling, told to whoever watches: a library prints nothing by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[str], None]
"""Called with the name of what begins; "" when nothing that has a name is under way."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_current: ContextVar[str] = ContextVar("current", default="")
_reader: ContextVar[Watcher | None] = ContextVar("reader", default=None)


@contextmanager
def watched(watcher: Watcher, reader: Watcher | None = None) -> Iterator[None]:
    """Tell ``watcher`` of each phase that begins in this thread, and of the one that goes on when it ends, and
    ``reader`` of each note on how far a phase has come."""
    tokens = _watcher.set(watcher), _reader.set(reader)
    try:
        yield
    finally:
        _watcher.reset(tokens[0])
        _reader.reset(tokens[1])


def note(text: str) -> None:
    """Say how far the phase under way has come; "" takes the last note back."""
    reader = _reader.get()
    if reader is not None:
        reader(text)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what is done inside; also a decorator. Phases nest: the innermost counts."""
    watcher = _watcher.get()
    if watcher is None:
        yield
        return
    outer = _current.get()
    token = _current.set(name)
    if name != outer:
        watcher(name)
    try:
        yield
    finally:
        _current.reset(token)
        if name != outer:
            watcher(outer)
