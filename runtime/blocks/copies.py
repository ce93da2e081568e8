"""Copies of whole blocks that are planned for a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from .pool import BlockPool


class CacheCopy(NamedTuple):
    """A copy of one block's content, in all layers of a group.

    Attributes:
        where: "move" within the device's cache, "out" to host memory, "in" from it.
        group: index of the group.
        source: block id.
        target: block id.
    """

    where: Literal["move", "out", "in"]
    group: int
    source: int
    target: int


class PlannedCopies:
    """The copies of the next step, and the blocks that must not be reused until copies are done.

    Attributes:
        before: copies to make one after the other before the step; what they write is not there yet.
        overlapped: copies to make while the step runs.
        in_flight: blocks, each with its pool, to release when the copies are done.
    """

    def __init__(self) -> None:
        self.before: list[CacheCopy] = []
        self.overlapped: list[CacheCopy] = []
        self.in_flight: list[tuple[BlockPool, int]] = []

    def plan(self, copies: Iterable[CacheCopy], *, overlapped: bool) -> None:
        """Add copies, to make while the step runs or before it."""
        (self.overlapped if overlapped else self.before).extend(copies)

    def take(self) -> tuple[list[CacheCopy], list[CacheCopy]]:
        """Return the copies to make before the step and while it runs; they are not planned any more."""
        taken = self.before, self.overlapped
        self.before, self.overlapped = [], []
        return taken

    def finish(self) -> None:
        """Release the blocks that copies needed, now that these are done."""
        done, self.in_flight = self.in_flight, []
        for pool, block in done:
            pool.release(block)
