"""Times the phases of compiling and reports them to a watcher, or logs them: a library prints nothing by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

logger = logging.getLogger(__name__)

Watcher = Callable[[str], None]
"""Called with the name of what begins; "" when nothing that has a name is under way."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_timer: ContextVar[Watcher | None] = ContextVar("timer", default=None)
_current: ContextVar[str] = ContextVar("current", default="")
_reader: ContextVar[Watcher | None] = ContextVar("reader", default=None)


_DOING = {
    "load": "loading the model, or the program of an earlier start",
    "reference": "running the model by transformers, whose logits are compared with the program's",
    "capture": "tracing the model",
    "passes": "rewriting its graph",
    "aten": "tracing the graph down to ATen operators",
    "verify": "comparing the program with the model",
    "codegen": "generating and compiling code for the graph, which can take minutes on first use",
    "pack": "laying the weights out for this processor",
    "kernels": "waiting for the C++ kernels, which are compiled on first use and kept",
    "torchair": "converting the graph with torchair",
    "warm-up": "compiling the sizes of steps",
    "cache": "allocating the KV cache",
}


@contextmanager
def logged() -> Iterator[None]:
    """Log each phase that begins inside, the first time, at INFO; nothing where somebody watches already."""
    if _watcher.get() is not None or not logger.isEnabledFor(logging.INFO):
        yield
        return
    said: set[str] = set()

    def tell(name: str) -> None:
        if name and name not in said:
            said.add(name)
            logger.info("%s", _DOING.get(name, name))

    with watched(tell):
        yield


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


class Stopwatch:
    """Adds up the seconds of phases, in the order in which they first began; one that comes again goes on.

    Args:
        seconds: by phase, added to; by default none yet.
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = {} if seconds is None else seconds
        self.current, self.since = "", time.perf_counter()

    def begin(self, phase: str) -> None:
        """End the phase that was under way and begin ``phase``; "" for none."""
        now = time.perf_counter()
        if self.current:
            self.seconds[self.current] += now - self.since
        self.current, self.since = phase, now
        if phase:
            self.seconds.setdefault(phase, 0.0)


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Add what each phase takes that begins inside in this thread to ``seconds``; of nested ones the innermost
    counts, but waiting for the C++ kernels counts as the phase that waits. Who measures outside learns of it, too."""
    stopwatch, outer, entered = Stopwatch(seconds), _timer.get(), _current.get()

    def begin(name: str) -> None:
        if name != "kernels":
            stopwatch.begin("" if name == entered else name)
            if outer is not None:
                outer(name)

    token = _timer.set(begin)
    try:
        yield
    finally:
        _timer.reset(token)


_imports = 0.0


@contextmanager
def importing() -> Iterator[None]:
    """Add what is done inside to :func:`import_seconds`."""
    global _imports
    start = time.perf_counter()
    yield
    _imports += time.perf_counter() - start


def import_seconds() -> float:
    """Return the seconds that imports of this package took since the last call."""
    global _imports
    seconds, _imports = _imports, 0.0
    return seconds


def note(text: str) -> None:
    """Say how far the phase under way has come; "" takes the last note back."""
    reader = _reader.get()
    if reader is not None:
        reader(text)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what is done inside; also a decorator. Phases nest: the innermost counts."""
    outer = _current.get()
    told = [watcher for watcher in (_watcher.get(), _timer.get()) if watcher is not None and name != outer]
    token = _current.set(name)
    for watcher in told:
        watcher(name)
    try:
        yield
    finally:
        _current.reset(token)
        for watcher in told:
            watcher(outer)
