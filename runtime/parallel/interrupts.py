"""Ctrl-C, held back while other ranks compute what this one has sent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let a SIGINT that comes inside be handled at the end.

    An exception between the message and the end of its computation would leave the ranks with different caches.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
