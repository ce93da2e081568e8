"""Python's garbage collector, kept from looking through a million new objects again and again while they are made."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let no cycles be collected inside; also a decorator.

    Importing libraries and compiling make objects that stay, and a full collection looks at all that there are: a
    sixth of an import's time. What is there at the end counts as old and is looked at when the next full collection
    is due. The last of several threads that are inside switches the collector on again; where it was off before,
    nothing changes.
    """
    global _inside
    with _lock:
        pauses = _inside > 0 or gc.isenabled()
        _inside += pauses
        if pauses:
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _inside = max(0, _inside - pauses)  # a child that was forked inside begins anew
            if pauses and not _inside:
                _resume()


def _resume() -> None:
    if not gc.get_freeze_count():  # else objects that somebody froze would thaw
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
    gc.enable()


def _resume_in_child() -> None:
    """Collect in a process that was forked meanwhile: the threads that were inside are not in it."""
    global _inside, _lock
    _lock = threading.Lock()
    if _inside:
        _inside = 0
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
