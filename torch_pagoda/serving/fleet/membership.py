"""Which replicas there are, handed from Serve's router to the front of the same process.

Serve makes the router, from a copy of its module: what both know must be in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

_listeners: list[Callable[[Collection[str]], object]] = []


def follow(listener: Callable[[Collection[str]], object]) -> None:
    """Have ``listener`` called with the names of all replicas when they change, in a thread of Serve's."""
    _listeners.append(listener)


def tell(names: Collection[str]) -> None:
    """Call the listeners of this process."""
    for listener in _listeners:
        listener(names)
