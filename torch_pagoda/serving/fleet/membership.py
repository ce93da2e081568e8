"""Which replicas there are, handed from Serve's router to the front of the same process.

Serve makes the router, from a copy of its module: what both know must be in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

_listeners: dict[str, Callable[[Collection[str]], object]] = {}


def follow(deployment: str, listener: Callable[[Collection[str]], object]) -> None:
    """Have ``listener`` called with the names of all replicas of a deployment when they change, in a thread of
    Serve's."""
    _listeners[deployment] = listener


def tell(deployment: str, names: Collection[str]) -> None:
    """Call the listener of this process."""
    if deployment in _listeners:
        _listeners[deployment](names)
