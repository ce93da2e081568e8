"""The process that starts those of the stages, tells them what to run, and notices when they die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .journal import CRASHED, FAILED, HUNG, NOT_RUN, RIGHT, WRONG, Journal, Outcome

__all__ = ["PREPARE", "Stage", "run_stage"]

PREPARE = "prepare"
"""The item that stands for making a stage's items."""
PREPARING = 1800.0
"""Seconds that making a stage's items may take at least: a model is loaded, and run on the CPU."""
_MOST_LOSSES = 5
_MOST_BYTES = 64 * 2**20
_SHOWN = 4096


@dataclass(frozen=True)
class Stage:
    """A part of the test.

    Attributes:
        name: of it.
        function: "module:function" that makes its items in the process of the stage, see ``worker.Items``.
        arguments: of the function, as JSON has them.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class _Gone(Exception):
    """The process of a stage does not answer; the message says why.

    Attributes:
        status: ``CRASHED`` or ``HUNG``.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def run_stage(
    stage: Stage, journal: Journal, seconds: float, show: Callable[[str, str], None] = lambda stage, item: None
) -> list[Outcome]:
    """Run the items of a stage that have no outcome yet, each after the other, whatever becomes of them.

    Args:
        stage: it.
        journal: knows outcomes of an earlier run, and learns each new one.
        seconds: without a word from an item, after which it counts as hung and its process is killed.
        show: told what is under way.

    Returns:
        the outcomes, in the order of the items; first that of making them, where it is not right.
    """
    losses = 0
    while True:
        done, plan = journal.outcomes(stage.name), journal.plan(stage.name)
        prepared = done.get(PREPARE)
        if prepared is not None and prepared.status != RIGHT:
            break
        if plan is not None and all(item in done for item in plan):
            break
        if losses == _MOST_LOSSES:
            reason = f"the process of this stage was lost {losses} times; look at pagoda npu doctor, then run again"
            for item in plan or ():
                if item not in done:
                    journal.end(stage.name, Outcome(item, NOT_RUN, reason))
            break
        losses += not _run_once(stage, journal, seconds, show)
    done, plan = journal.outcomes(stage.name), journal.plan(stage.name) or []
    for item in plan:
        if item not in done:
            journal.end(stage.name, Outcome(item, NOT_RUN, "the stage could not be prepared again"))
    done = journal.outcomes(stage.name)
    first = [done[PREPARE]] if PREPARE in done and done[PREPARE].status != RIGHT else []
    return first + [done[item] for item in plan]


def _run_once(stage: Stage, journal: Journal, seconds: float, show: Callable[[str, str], None]) -> bool:
    """Start the process of a stage and run what is left; False if the process was lost before all was run."""
    item = PREPARE
    child = _Child(stage)
    try:
        journal.begin(stage.name, PREPARE)
        show(stage.name, PREPARE)
        outcome = _asked(child, PREPARE, None, max(seconds, PREPARING), lambda found: None)
        items = outcome.found.pop("items", [])
        outcome.found.pop("fatal", None)
        journal.end(stage.name, outcome)
        if outcome.status != RIGHT:
            return False
        journal.planned(stage.name, items)
        for item in [each for each in items if each not in journal.outcomes(stage.name)]:
            journal.begin(stage.name, item)
            show(stage.name, item)
            noted = partial(journal.progress, stage.name, item)
            outcome = _asked(child, item, {"run": item}, seconds, noted)
            fatal = outcome.found.pop("fatal", False)
            journal.end(stage.name, outcome)
            if fatal or outcome.status in (CRASHED, HUNG):
                return False
        return True
    except KeyboardInterrupt:
        journal.interrupted(stage.name, item)
        raise
    finally:
        child.close()


def _asked(
    child: _Child,
    item: str,
    request: Mapping[str, Any] | None,
    seconds: float,
    noted: Callable[[dict[str, Any]], None],
) -> Outcome:
    """What becomes of an item."""
    began = time.monotonic()
    said: dict[str, Any] = {}

    def ended(status: str, reason: str = "", found: Mapping[str, Any] = {}) -> Outcome:
        return Outcome(item, status, reason, round(time.monotonic() - began, 3), {**said, **found})

    try:
        if request is not None:
            child.send(request)
        while True:
            answer = child.answer(seconds)
            if isinstance(answer.get("progress"), dict):
                said.update(answer["progress"])
                noted(answer["progress"])
            elif "items" in answer:
                return ended(RIGHT, found={"items": [str(each) for each in answer["items"]]})
            elif "error" in answer:
                return ended(FAILED, str(answer["error"]), {"fatal": bool(answer.get("fatal"))})
            elif isinstance(answer.get("result"), dict):
                result = dict(answer["result"])
                wrong = str(result.pop("wrong", ""))
                said.pop("doing", None)
                return ended(WRONG if wrong else RIGHT, wrong, result)
            else:
                raise _Gone(CRASHED, "its process said something that is no answer")
    except _Gone as gone:
        return ended(gone.status, str(gone))


class _Child:
    """The process of a stage.

    Args:
        stage: it.
    """

    def __init__(self, stage: Stage) -> None:
        self._rest = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_pagoda.selftest.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the process that decides what is noted
        )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        with contextlib.suppress(_Gone):  # that it is gone is noticed when it is to answer
            self.send({"stage": stage.function, "arguments": dict(stage.arguments)})

    def send(self, request: Mapping[str, Any]) -> None:
        """Write a line.

        Raises:
            _Gone: nobody reads it.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise _Gone(CRASHED, self._end()) from None

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next line, within so many seconds.

        Raises:
            _Gone: there is none in time, or the process has ended.
        """
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            has_ended = self._process.poll() is not None
            left = until - time.monotonic()
            if left <= 0:
                self._kill()
                raise _Gone(
                    HUNG,
                    f"nothing was heard of it for {seconds:g} s; its process was killed; raise --timeout where it "
                    "only takes long",
                )
            if not self._selector.select(min(left, 1.0)):
                if has_ended:  # a process that it forked may still hold the pipe
                    raise _Gone(CRASHED, self._end())
                continue
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise _Gone(CRASHED, self._end())
            self._rest += read
            if len(self._rest) > _MOST_BYTES:
                self._kill()
                raise _Gone(CRASHED, "its process said more than can be read")
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise _Gone(CRASHED, "its process said something that is no answer")
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._kill()
        self._selector.close()
        self._process.stdout.close()
        self._errors.close()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it; nothing can be done then
            self._process.wait(10)

    def _end(self) -> str:
        """How the process ended, and the last that it wrote to standard error."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._kill()
            return "its process closed its output and did not end"
        how = f"its process ended with status {code}" if code >= 0 else f"its process died of {_signal(-code)}"
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - _SHOWN))
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}; the last that it wrote: {last[:500]}" if last else how


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
