"""Python's garbage collector, kept from looking through a million new objects again and again while they are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let no cycles be collected inside; also a decorator.

    Importing libraries and compiling make objects that stay, and a full collection looks at all that there are: a
    sixth of an import's time. What is there at the end counts as old and is looked at when the next full collection
    is due. Nothing changes where somebody else has switched the collector off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else objects that somebody froze would thaw
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
