"""The journal of a test: what was begun and what it ended in, on disk before the next thing begins.

A line of JSON for each event; a later run replays them. Where the machine, the device's driver or this process ended
in the middle, the last item that was begun has no end: it is what was under way, and is not tried again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CRASHED", "FAILED", "HUNG", "NOT_RUN", "RIGHT", "WRONG", "Journal", "Outcome"]

log = logging.getLogger(__name__)

RIGHT, WRONG, FAILED, CRASHED, HUNG, NOT_RUN = "right", "wrong", "failed", "crashed", "hung", "not run"
_STATUSES = (RIGHT, WRONG, FAILED, CRASHED, HUNG, NOT_RUN)
_DIED = "the process, or the machine, ended while this ran; it is not tried again"


@dataclass(frozen=True)
class Outcome:
    """What became of an item.

    Attributes:
        item: its name.
        status: ``RIGHT``, ``WRONG``, ``FAILED`` (an error), ``CRASHED`` (its process died), ``HUNG`` or ``NOT_RUN``.
        reason: why it is not right, with the remedy where one is known; "" when it is.
        seconds: that it took.
        found: its result, or as much as was said before it ended.
    """

    item: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


class Journal:
    """A file of events.

    Args:
        path: of the file. One that is there is gone on with, if it was begun for the same ``subject`` and not
            finished.
        subject: what is tested and how.
        again: begin anew in any case.

    Attributes:
        resumed: it goes on with an earlier run.

    Raises:
        ValueError: another run writes the file.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any], *, again: bool = False) -> None:
        self._outcomes: dict[str, dict[str, Outcome]] = {}
        self._plans: dict[str, list[str]] = {}
        self._under_way: dict[str, Outcome] = {}
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another run writes to {path.parent}; wait for it, or name another --out") from None
        except OSError:  # a file system without locks
            pass
        first = {"subject": json.loads(json.dumps(subject))}
        self._file.seek(0)
        events = [] if again else list(_events(self._file))
        self.resumed = events[:1] == [first] and {"finished": True} not in events
        if not self.resumed:
            self._file.truncate(0)
            self._write(first)
            return
        self._file.write("\n")  # behind a line that was cut off
        for event in events[1:]:
            self._replay(event)
        for stage, died in list(self._under_way.items()):
            self.end(stage, died)

    def outcomes(self, stage: str) -> dict[str, Outcome]:
        """Item → what became of it, of those of a stage that were begun."""
        return dict(self._outcomes.get(stage, {}))

    def plan(self, stage: str) -> list[str] | None:
        """Names of the items of a stage, in order; None as long as they are not known."""
        return self._plans.get(stage)

    def note(self, stage: str, **event: Any) -> None:
        """Note what happened in a stage; this is on disk when it returns.

        Args:
            stage: its name.
            **event: ``plan=`` its items, ``begin=`` an item, ``progress=`` an item and what it has ``found=``, or
                ``interrupted=`` an item that the user stopped, which is tried again.
        """
        self._replay({"stage": stage, **event})
        self._write({"stage": stage, **event})

    def end(self, stage: str, outcome: Outcome) -> None:
        """Note what became of an item."""
        self.note(stage, end=asdict(outcome))

    def close(self, *, finished: bool) -> None:
        """Close the file; the next run begins anew where this one is finished."""
        if finished:
            self._write({"finished": True})
        self._file.close()

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _replay(self, event: object) -> None:
        match event:
            case {"stage": str(stage), "plan": [*items]} if all(isinstance(item, str) for item in items):
                self._plans[stage] = items
            case {"stage": str(stage), "begin": str(item)}:
                self._under_way[stage] = Outcome(item, CRASHED, _DIED)
            case {"stage": str(stage), "progress": str(), "found": dict(found)} if stage in self._under_way:
                self._under_way[stage].found.update(found)
            case {"stage": str(stage), "interrupted": str()}:
                self._under_way.pop(stage, None)
            case {"stage": str(stage), "end": dict(end)} if _is_outcome(end):
                self._under_way.pop(stage, None)
                self._outcomes.setdefault(stage, {})[end["item"]] = Outcome(**end)
            case _:
                log.warning("a line of the journal is passed over: it is not an event: %.200s", event)


def _is_outcome(data: Mapping[str, Any]) -> bool:
    match data:
        case {"item": str(), "status": status, "reason": str(), "seconds": int() | float(), "found": dict(), **more}:
            return status in _STATUSES and not more
    return False


def _events(lines: Iterator[str]) -> Iterator[object]:
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            if line.strip():
                log.warning("a line of the journal is passed over: it was cut off: %s", error)
