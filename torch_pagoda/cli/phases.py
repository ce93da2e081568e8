"""Shows the phases of a start: a line on the terminal, with seconds; otherwise log lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..runtime.phases import Stopwatch, logged, logger, watched


class PhaseLine(Stopwatch):
    """A line of phases with their seconds so far."""

    def __init__(self) -> None:
        super().__init__()
        self._note = ""

    def note(self, text: str) -> None:
        """Show the progress of the current phase; "" for none."""
        self._note = text

    def __rich__(self) -> Text:
        text = Text("compiling, seconds:")
        running = time.perf_counter() - self.since
        for phase, seconds in self.seconds.items():
            current = phase == self.current
            # Spaces inside an entry do not break, so that a narrow terminal keeps name and figure together.
            text.append(f" {phase}\u00a0{seconds + running * current:.1f}", style="bold cyan" if current else "dim")
        if self._note:
            text.append(f" ({self._note})".replace(" ", "\u00a0"))
        return text


@contextmanager
def show_phases(model: str = "") -> Iterator[None]:
    """Show the compilation phases within this context on stderr, and clear them at the end.

    Nothing is shown before the first phase begins. If stderr is not a terminal, each phase logs one line at INFO when
    it begins, regardless of the log level.

    Args:
        model: the name in that line of the model to load; "" for none.
    """
    console = Console(stderr=True)
    if not (console.is_terminal and sys.stderr.isatty()):
        with log_phases(model):
            yield
        return
    line = PhaseLine()
    with ExitStack() as stack:

        def show(phase: str) -> None:
            if live.is_started:
                line.begin(phase)
            elif phase:
                line.begin(phase)
                stack.enter_context(live)
                stack.enter_context(_logging_above(terminal))

        terminal = sys.stderr
        live = Live(line, console=console, transient=True, refresh_per_second=8, redirect_stdout=False)
        stack.enter_context(watched(show, line.note))
        yield


@contextmanager
def log_phases(model: str = "") -> Iterator[None]:
    """Log the lines of ``show_phases`` even at level WARNING."""
    before = logger.level
    logger.setLevel(logging.INFO)
    if model:
        logger.info("loading %s", model)
    try:
        with logged():
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _logging_above(terminal: object) -> Iterator[None]:
    """Print log messages for ``terminal`` above the line instead of in it."""
    moved = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is terminal
    ]
    for handler in moved:
        handler.setStream(sys.stderr)  # rich's, while the line is shown
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(terminal)
