"""The error of a group of ranks that computes nothing any more."""

from __future__ import annotations

from ..npu_errors.device_lost import DeviceLost


class GroupFailed(DeviceLost):
    """A rank of a group ended, is late or gave up, so that none of them can go on.

    Attributes:
        rank: the one that failed.
        reason: what became of it, in a sentence.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank
        self.reason = reason
