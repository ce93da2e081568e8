"""Handles the first step of a graph, at which GE compiles it and may reject it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .....runtime.npu_errors.device_lost import raise_if_lost
from ....report import first_line
from ..route import Run


class FirstRuns:
    """Tells graphs that never ran, which fail because they cannot run, from those whose errors are the caller's.

    Args:
        drop: takes the key of a graph that cannot run, and the reason.
        writes_state: steps write over states in place, which a step that failed may have begun.

    Attributes:
        falls_back: a graph that cannot run is dropped; not where other ranks have one like it.
    """

    def __init__(self, drop: Callable[[int, str], None], *, writes_state: bool) -> None:
        self._drop, self._writes_state = drop, writes_state
        self.falls_back = True
        self._have_run: set[int] = set()

    def run(self, key: int, graph: Callable[[int], Run], args: Sequence[Any]) -> Sequence[Any]:
        """The outputs of the graph that ``graph`` makes, or has made, for ``key``, whatever it raises."""
        outputs = graph(key)(*args)
        self._have_run.add(key)
        return outputs

    def attempt(self, key: int, graph: Callable[[int], Run], args: Sequence[Any]) -> Sequence[Any] | None:
        """The same; None where the graph turns out not to run, and is dropped.

        Raises:
            Exception: of a graph that has run before, or that other ranks have one like; of one that may have written
                over a state, which is dropped: the caller has to compute the sequences anew.
            DeviceLost: the device is.
        """
        compiled = False
        try:
            run = graph(key)
            compiled = True
            outputs = run(*args)
        except Exception as error:
            raise_if_lost(error)
            if key in self._have_run or not self.falls_back:
                raise
            self._drop(key, f"it fails: {first_line(error)}")
            if compiled and self._writes_state:
                raise
            return None
        self._have_run.add(key)
        return outputs

    def forget(self, key: int) -> None:
        """The graph of ``key`` is gone."""
        self._have_run.discard(key)

    def clear(self) -> None:
        """All graphs are gone."""
        self._have_run.clear()
