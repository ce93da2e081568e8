"""Runs the items of a stage in a process of its own, and detects when it dies or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

from .journal import CRASHED, FAILED, HUNG, NOT_RUN, RIGHT, WRONG, Journal, Outcome

__all__ = ["PREPARE", "Stage", "run_stage"]

PREPARE = "prepare"
"""The item for preparing a stage's items."""
PREPARING = 1800.0
"""Minimum seconds allowed to prepare a stage's items: a model is loaded, and run on the CPU."""
_MOST_LOSSES = 5
_MOST_BYTES = 64 * 2**20
_SHOWN = 4096


@dataclass(frozen=True)
class Stage:
    """A stage of the test.

    Attributes:
        name: its name.
        function: "module:function" that makes its items in the process of the stage; see ``worker.Items``.
        arguments: arguments of the function, as JSON data.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def run_stage(
    stage: Stage, journal: Journal, seconds: float, show: Callable[[str, str], None] = lambda stage, item: None
) -> list[Outcome]:
    """Run the items of a stage without an outcome, one after the other, whatever happens to them.

    Args:
        stage: the stage.
        journal: has the outcomes of an earlier run, and records new ones.
        seconds: without a message of an item, after which it counts as hung and its process is killed.
        show: called with the current item.

    Returns:
        the outcomes, in the order of the items; first that of the preparation, if it failed.
    """
    losses = 0
    while True:
        done, plan = journal.outcomes(stage.name), journal.plan(stage.name)
        unprepared = [done[PREPARE]] if PREPARE in done and done[PREPARE].status != RIGHT else []
        if unprepared or losses == _MOST_LOSSES or (plan is not None and done.keys() >= set(plan)):
            break
        losses += not _run_once(stage, journal, seconds, show)
    reason = f"the process of this stage was lost {losses} times; run pagoda npu doctor, then run again"
    for item in plan or ():
        if item not in done:
            why = "the stage could not be prepared again" if unprepared else reason
            journal.end(stage.name, Outcome(item, NOT_RUN, why))
    done = journal.outcomes(stage.name)
    return unprepared + [done[item] for item in plan or ()]


def _run_once(stage: Stage, journal: Journal, seconds: float, show: Callable[[str, str], None]) -> bool:
    """Start the process of a stage and run the remaining items; returns False if the process was lost before the
    end."""
    child = _Child()
    item = PREPARE

    def run(request: Mapping[str, Any], seconds: float) -> Outcome:
        journal.note(stage.name, begin=item)
        show(stage.name, item)
        return child.run(item, request, seconds, lambda found: journal.note(stage.name, progress=item, found=found))

    try:
        outcome = run({"stage": stage.function, "arguments": dict(stage.arguments)}, max(seconds, PREPARING))
        items, fatal = outcome.found.pop("items", []), outcome.found.pop("fatal", False)
        journal.end(stage.name, outcome)
        if outcome.status != RIGHT:
            return False
        journal.note(stage.name, plan=items)
        for item in [each for each in items if each not in journal.outcomes(stage.name)]:
            outcome = run({"run": item}, seconds)
            fatal = outcome.found.pop("fatal", False)
            journal.end(stage.name, outcome)
            if fatal or outcome.status in (CRASHED, HUNG):
                return False
        return True
    except KeyboardInterrupt:
        journal.note(stage.name, interrupted=item)
        raise
    finally:
        child.close()


class _Child:
    """The process of a stage."""

    def __init__(self) -> None:
        self._pipe, other = Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_pagoda.npu_tools.selftest.worker", str(other.fileno())],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            start_new_session=True,  # Ctrl-C is for the process that decides what is noted
        )
        other.close()

    def run(
        self, item: str, request: Mapping[str, Any], seconds: float, noted: Callable[[dict[str, Any]], None]
    ) -> Outcome:
        """Run an item and return its outcome.

        Args:
            item: its name.
            request: the message to the process.
            seconds: without a message, after which it counts as hung.
            noted: called with partial results.
        """
        began = time.monotonic()
        said: dict[str, Any] = {}

        def ended(status: str, reason: str, found: Mapping[str, Any]) -> Outcome:
            return Outcome(item, status, reason, round(time.monotonic() - began, 3), {**said, **found})

        with contextlib.suppress(OSError):  # that the process is gone is noticed when it is to answer
            self._pipe.send_bytes(json.dumps(request).encode())
        while True:
            match self._answer(seconds):
                case {"progress": dict() as progress}:
                    said.update(progress)
                    noted(progress)
                case {"items": list()} as found:
                    return ended(RIGHT, "", found)
                case {"result": dict() as result}:
                    wrong = str(result.pop("wrong", ""))
                    said.pop("doing", None)
                    return ended(WRONG if wrong else RIGHT, wrong, result)
                case {"error": str(error), **rest}:
                    return ended(FAILED, error, {str(name): value for name, value in rest.items()})
                case {"lost": str(status), "reason": str(reason)}:
                    return ended(status, reason, {})
                case _:
                    return ended(CRASHED, "its process sent an invalid message", {})

    def _answer(self, seconds: float) -> Any:
        """The next message of the process; if there is none, whether it is ``CRASHED`` or ``HUNG``."""
        until = time.monotonic() + seconds
        while True:
            has_ended, left = self._process.poll() is not None, until - time.monotonic()
            if self._pipe.poll(max(0.0, min(left, 1.0))):
                break
            if has_ended:  # a process that it forked may still hold the pipe
                return {"lost": CRASHED, "reason": self._end()}
            if left <= 0:
                self._kill()
                reason = f"no message for {seconds:g} s; its process was killed"
                return {"lost": HUNG, "reason": f"{reason}; raise --timeout if it is only slow"}
        try:
            return json.loads(self._pipe.recv_bytes(_MOST_BYTES))
        except (EOFError, OSError):  # the latter for messages beyond that limit, too
            return {"lost": CRASHED, "reason": self._end()}
        except ValueError:
            return None

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._kill()
        self._printed.close()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it; nothing can be done then
            self._process.wait(10)

    def _end(self) -> str:
        """How the process ended, and its last output."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._kill()
            return "its process closed its end of the pipe and did not exit"
        how = f"its process ended with status {code}" if code >= 0 else f"its process was killed by {_signal(-code)}"
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - _SHOWN))
        lines = self._printed.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}; its last output: {last[:500]}" if last else how


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
