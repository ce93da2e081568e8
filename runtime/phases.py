"""Phases of compiling, told to whoever watches: a library prints nothing by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[str], None]
"""Called with the name of what begins; "" when nothing that has a name is under way."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_current: ContextVar[str] = ContextVar("current", default="")


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` of each phase that begins in this thread, and of the one that goes on when it ends."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


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
