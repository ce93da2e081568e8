"""The journal of a test: records the beginning and the outcome of each item on disk.

One line of JSON per event; a later run replays them. If the machine, the driver or this process ended in the middle,
the last item without an outcome is the culprit, and is not retried.
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
_DIED = "the process, or the machine, ended during this item; it is not retried"


@dataclass(frozen=True)
class Outcome:
    """The outcome of an item.

    Attributes:
        item: its name.
        status: ``RIGHT``, ``WRONG``, ``FAILED`` (an error), ``CRASHED`` (its process died), ``HUNG`` or ``NOT_RUN``.
        reason: why it is not right, with the remedy if one is known; "" if it is.
        seconds: its duration.
        found: its result, or the partial one before it ended.
    """

    item: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


class Journal:
    """A file of events.

    Args:
        path: path of the file. An existing, unfinished file for the same ``subject`` is continued.
        subject: what is tested and how.
        again: start over in any case.

    Attributes:
        resumed: whether it continues an earlier run.

    Raises:
        ValueError: another run writes to the file.
        OSError: the file cannot be written.
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
            raise ValueError(f"another run writes to {path.parent}; wait for it, or use another --out") from None
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
        """Item → outcome, for the items of a stage that were begun."""
        return dict(self._outcomes.get(stage, {}))

    def plan(self, stage: str) -> list[str] | None:
        """Names of the items of a stage, in order; None if they are not known yet."""
        return self._plans.get(stage)

    def note(self, stage: str, **event: Any) -> None:
        """Record an event of a stage; it is on disk on return.

        Args:
            stage: its name.
            **event: ``plan=`` its items, ``begin=`` an item, ``progress=`` an item and its ``found=`` so far, or
                ``interrupted=`` an item that the user stopped, which is retried.
        """
        self._replay({"stage": stage, **event})
        self._write({"stage": stage, **event})

    def end(self, stage: str, outcome: Outcome) -> None:
        """Record the outcome of an item."""
        self.note(stage, end=asdict(outcome))

    def close(self, *, finished: bool) -> None:
        """Close the file; after a finished run, the next one starts over."""
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
                log.warning("ignoring an invalid line of the journal: %.200s", event)


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
                log.warning("ignoring an invalid line of the journal: %s", error)
