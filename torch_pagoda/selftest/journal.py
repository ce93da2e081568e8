"""The journal of a test: what was begun and what it ended in, on disk before the next thing begins.

A line of JSON for each event. Where the machine, the device's driver or this process ended in the middle, the last
item that was begun has no end: it is what was under way, and is not tried again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CRASHED", "FAILED", "HUNG", "NOT_RUN", "RIGHT", "WRONG", "Journal", "Outcome"]

RIGHT, WRONG, FAILED, CRASHED, HUNG, NOT_RUN = "right", "wrong", "failed", "crashed", "hung", "not run"
_STATUSES = (RIGHT, WRONG, FAILED, CRASHED, HUNG, NOT_RUN)
_MOST_BYTES = 64 * 2**20
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
        subject = json.loads(json.dumps(subject))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another run writes to {path.parent}; wait for it, or name another --out") from None
        except OSError:  # a file system without locks
            pass
        lines = [] if again else _lines(path)
        self.resumed = bool(lines) and lines[0] == {"subject": subject} and {"finished": True} not in lines
        died = self._read(lines[1:]) if self.resumed else []
        if self.resumed:
            self._file.write("\n")  # behind a line that was cut off
        else:
            os.ftruncate(descriptor, 0)
            self._write(subject=subject)
        for stage, outcome in died:
            self.end(stage, outcome)

    def outcomes(self, stage: str) -> dict[str, Outcome]:
        """Item → what became of it, of those of a stage that were begun."""
        return dict(self._outcomes.get(stage, {}))

    def plan(self, stage: str) -> list[str] | None:
        """Names of the items of a stage, in order; None as long as they are not known."""
        return self._plans.get(stage)

    def planned(self, stage: str, items: list[str]) -> None:
        """Note the items of a stage."""
        self._plans[stage] = items
        self._write(stage=stage, plan=items)

    def begin(self, stage: str, item: str) -> None:
        """Note that an item begins; this is on disk when it returns."""
        self._write(stage=stage, begin=item)

    def progress(self, stage: str, item: str, found: Mapping[str, Any]) -> None:
        """Note what an item under way has said."""
        self._write(stage=stage, progress=item, found=found)

    def end(self, stage: str, outcome: Outcome) -> None:
        """Note what became of an item."""
        self._outcomes.setdefault(stage, {})[outcome.item] = outcome
        self._write(stage=stage, end=asdict(outcome))

    def interrupted(self, stage: str, item: str) -> None:
        """Note that an item was stopped by the user; it is tried again."""
        self._write(stage=stage, interrupted=item)

    def close(self, *, finished: bool) -> None:
        """Close the file; the next run begins anew where this one is finished."""
        if finished:
            self._write(finished=True)
        self._file.close()

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, events: list[dict[str, Any]]) -> list[tuple[str, Outcome]]:
        """Take over what an earlier run noted; stage and outcome of the items that have no end."""
        begun: dict[str, str] = {}
        said: dict[tuple[str, str], dict[str, Any]] = {}
        for event in events:
            stage = event.get("stage")
            if not isinstance(stage, str):
                continue
            plan, begin, interrupted = event.get("plan"), event.get("begin"), event.get("interrupted")
            if isinstance(plan, list) and all(isinstance(item, str) for item in plan):
                self._plans[stage] = plan
            if isinstance(begin, str):
                begun[stage] = begin
            if isinstance(interrupted, str):
                begun.pop(stage, None)
            if isinstance(item := event.get("progress"), str) and isinstance(found := event.get("found"), dict):
                said[stage, item] = {**said.get((stage, item), {}), **found}
            if (outcome := _outcome(event.get("end"))) is not None:
                self._outcomes.setdefault(stage, {})[outcome.item] = outcome
                if begun.get(stage) == outcome.item:
                    del begun[stage]
        return [
            (stage, Outcome(item, CRASHED, _DIED, found=said.get((stage, item), {}))) for stage, item in begun.items()
        ]


def _outcome(data: Any) -> Outcome | None:
    """An outcome as it was written; None for anything else."""
    if not isinstance(data, dict) or set(data) != {"item", "status", "reason", "seconds", "found"}:
        return None
    texts = all(isinstance(data[name], str) for name in ("item", "status", "reason"))
    if not texts or data["status"] not in _STATUSES or not isinstance(data["found"], dict):
        return None
    return Outcome(**data) if isinstance(data["seconds"], int | float) else None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The events of a file, without what is no event; none where it cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return []
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # cut off
            continue
        if isinstance(event, dict):
            found.append(event)
    return found
