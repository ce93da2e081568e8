"""Serializes threads that call the engine, in order of arrival, within the process that created it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """Lets threads act one after the other, in order of arrival.

    A lock alone is not fair: a thread that releases it and acquires it again at once overtakes waiting threads. Here
    each thread holds a lock of its own while it waits and acts, and waits for the lock of the thread before it (the
    queue lock of Craig, and of Magnussen, Landin and Hagersten, 1993). These locks ensure the order. One more lock,
    independent of them, ensures exclusion. Only ``with`` statements on locks implemented in C hold them, so no
    exception and no Ctrl-C can leave them locked.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._acting = threading.RLock()  # re-entrant only to know its owner
        self._last = threading.Lock()  # of the last thread to arrive

    @property
    def is_here(self) -> bool:
        """True if this is the process that made it."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raise unless this is the process that made it.

        Raises:
            RuntimeError: it was forked since. Its threads (torch's among them) are gone there, and locks that they
                held stay locked.
        """
        if not self.is_here:
            raise RuntimeError(
                f"the engine was created in process {self._process} and cannot be used in its fork "
                f"{os.getpid()}; create it in the process that uses it, or start that with multiprocessing's "
                '"spawn"'
            )

    @property
    def is_mine(self) -> bool:
        """True if this thread is acting."""
        owned: bool = self._acting._is_owned()  # type: ignore[attr-defined]  # what threading.Condition asks, too
        return owned

    def take(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait for this thread's turn and call ``action`` in it; returns what that returns.

        Raises:
            RuntimeError: this thread is acting already: a hook or a signal handler calls, at a moment when nothing
                can be relied on. Or the process was forked.
        """
        self.check_process()
        if self.is_mine:
            raise RuntimeError(
                "the engine is called by a hook or signal handler within one of its own steps; call it "
                "after the step, or from another thread"
            )
        mine = threading.Lock()
        with mine:
            before, self._last = self._last, mine
            with before:
                pass
            with self._acting:
                return action(*args, **kwargs)

    def take_if_free(self, action: Callable[[], None]) -> None:
        """Call ``action`` if nobody waits or acts, or if this thread is the one that acts; else do nothing.

        For the garbage collector, which may call in the middle of anything: of ``take``, or while this thread holds a
        lock that the one that acts will ask for. It never waits.
        """
        if not self.is_here:
            return
        if self.is_mine:
            action()
            return
        mine = threading.Lock()
        with mine:
            before, self._last = self._last, mine
            if not before.locked():
                with self._acting:
                    action()
