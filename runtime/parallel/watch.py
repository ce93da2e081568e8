"""The thread of rank 0 that starts the other ranks, and ends them all when one of them fails."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from ..process_state import StoppedProcesses
from .channel import ChannelClosed
from .group import CollectiveFailed, GroupFailed
from .messages import Message, TornMessage
from .torchrun import LaunchedWorker
from .workers import Worker

logger = logging.getLogger(__name__)

AnyWorker = Worker | LaunchedWorker

GRACE = 0.5
"""Seconds that a consequence waits for its cause: an exchange that failed, for the rank that made it fail."""

_LONGEST_WAIT = 1.0
_LOOK = _LONGEST_WAIT / 4
"""Seconds between two looks at the other ranks during a task."""


class Watch:
    """Owns the processes of the other ranks, from their start to their end.

    The thread starts them itself: the kernel ends them with the thread that started them, whatever becomes of that.

    Args:
        start: starts them.
        on_failure: called in the thread once, when they have been ended because one failed.

    Raises:
        OSError: a process could not be started.
    """

    def __init__(
        self, start: Callable[[], Sequence[AnyWorker]], on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self._start = start
        self._on_failure = on_failure
        self._news = threading.Condition()
        self._workers: dict[int, AnyWorker] | None = None
        self._answers: dict[int, list[Message]] = {}
        self._failure: GroupFailed | None = None
        self._cause: tuple[float, GroupFailed] | None = None  # and when it is too late for another one
        self._refusal: BaseException | None = None
        self._task, self._deadline = "at the start", float("inf")
        self._stopped, self._next_look = StoppedProcesses(), 0.0
        self._ends_at: float | None = None
        self._is_over = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="pagoda-ranks", daemon=True)
        self._thread.start()
        with self._news:
            self._news.wait_for(lambda: self._workers is not None or self._refusal is not None)
        if self._refusal is not None:
            raise self._refusal

    @property
    def workers(self) -> list[AnyWorker]:
        """Those that were started."""
        return list((self._workers or {}).values())

    @property
    def failure(self) -> GroupFailed | None:
        """What has failed, when all were ended because of it."""
        return self._failure

    @contextmanager
    def task(self, name: str, seconds: float) -> Iterator[None]:
        """Let what is inside take so long, and fail the group if it raises.

        Args:
            name: behind "in"; None: between two tasks.
            seconds: until the deadline.

        Raises:
            GroupFailed: an exception inside, or another rank's.
        """
        if self._failure is not None:
            raise self._failure
        self._task, self._deadline = f"in {name}", time.monotonic() + seconds
        try:
            yield
        except BaseException as error:
            failure = self.fail(error)
            if isinstance(error, Exception):
                raise failure from error
            raise
        finally:
            self._task, self._deadline = f"after {name}", float("inf")

    def answers(self, kind: Literal["here", "loaded"]) -> dict[int, Message]:
        """The answer of every rank, when all have given it.

        Raises:
            GroupFailed: a rank did not.
        """
        with self._news:
            self._news.wait_for(lambda: self._failure is not None or all(self._answers.values()))
            if self._failure is not None:
                raise self._failure
            found = {rank: messages.pop(0) for rank, messages in self._answers.items()}
        for rank, message in found.items():
            if message.kind != kind:
                raise GroupFailed(rank, f"answered {message.kind!r} instead of {kind!r}")
        return found

    def wait(self, thread: threading.Thread) -> None:
        """Wait for a thread that may wait for another rank.

        Raises:
            GroupFailed: a rank failed; the thread goes on until it notices.
        """
        while thread.is_alive():
            thread.join(0.01)
            if self._failure is not None:
                raise self._failure

    def fail(self, error: BaseException) -> GroupFailed:
        """End all ranks because of an error in this one; what has failed first."""
        failure = error if isinstance(error, GroupFailed) else GroupFailed(0, f"failed {self._task}: {_line(error)}")
        with self._news:
            if self._is_over and self._cause is None:
                return failure  # all have ended before
            if self._failure is None:
                self._note(failure, is_consequence=isinstance(error, CollectiveFailed | ChannelClosed))
                if not self._is_over:  # the thread has closed it then, and is about to say what has failed
                    os.eventfd_write(self._wake, 1)
                self._news.wait_for(lambda: self._failure is not None, timeout=10 * GRACE)
            return self._failure or failure

    def end(self, seconds: float) -> None:
        """Tell all ranks to end, and end those that have not after so long; a second call does nothing."""
        with self._news:
            if not self._is_over:
                self._deadline = float("inf")
                self._ends_at = time.monotonic() + seconds
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _run(self) -> None:
        try:
            workers = self._start()
        except BaseException as error:
            with self._news:
                self._refusal = error
                self._news.notify_all()
            os.close(self._wake)
            return
        with self._news:
            self._answers = {worker.rank: [] for worker in workers}
            self._workers = {worker.rank: worker for worker in workers}
            self._news.notify_all()
        try:
            self._watch(workers)
        except Exception as error:
            logger.exception("cannot watch the other ranks")
            self._note(GroupFailed(0, f"cannot watch the others: {_line(error)}"))
        finally:
            for worker in workers:
                worker.kill()
            with self._news:
                self._is_over = True
                os.close(self._wake)
            if self._cause is not None:
                logger.error("%s", self._cause[1])
                self._on_failure()
            with self._news:
                if self._cause is not None:
                    self._failure = self._cause[1]
                self._news.notify_all()

    def _watch(self, workers: Sequence[AnyWorker]) -> None:
        """Return when all ranks are to be killed."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        ends = {worker.pidfd: worker for worker in workers if worker.pidfd >= 0}
        channels = {worker.channel.fileno(): worker for worker in workers}
        for descriptor in (*ends, *channels):
            poll.register(descriptor, select.POLLIN)
        while self._ends_at is None:
            # What a rank said comes before its end, which may be why it said it.
            for descriptor in sorted(self._events(poll), key=ends.__contains__):
                if descriptor in channels and not self._hear(channels[descriptor]):
                    poll.unregister(descriptor)
                    # A child's end is told by its descriptor, which knows its status.
                    if not isinstance(channels[descriptor], Worker) and self._ends_at is None:
                        self._note(self._ended(channels[descriptor]))
                elif descriptor in ends and self._ends_at is None:
                    worker = ends[descriptor]
                    while self._hear(worker):
                        pass
                    self._note(self._ended(worker))
            now = time.monotonic()
            if now >= self._deadline:
                self._note(self._late(workers))
            elif self._deadline < float("inf") and now >= self._next_look:
                self._next_look = now + _LOOK
                for worker in workers:
                    if self._stopped.look(worker.pid):
                        self._note(GroupFailed(worker.rank, f"{worker.name} was stopped {self._task}"))
            if self._cause is not None and now >= self._cause[0]:
                return
        for worker in workers:
            worker.channel.end()
        for worker in workers:
            worker.wait(self._ends_at - time.monotonic())

    def _events(self, poll: select.poll) -> list[int]:
        """Descriptors that have become readable, or none by the time of the next deadline."""
        until = min(self._deadline, self._cause[0] if self._cause else float("inf"))
        longest = _LONGEST_WAIT if self._deadline == float("inf") else _LOOK
        seconds = min(max(until - time.monotonic(), 0.0), longest)
        events = [descriptor for descriptor, _ in poll.poll(seconds * 1000)]
        if self._wake in events:
            os.eventfd_read(self._wake)
            events.remove(self._wake)
        return events

    def _hear(self, worker: AnyWorker) -> bool:
        """Take one message of a rank; False if there is none."""
        try:
            if not worker.channel.has_news:
                return False
            message = worker.channel.receive()
        except ChannelClosed:
            return False
        except TornMessage as error:
            self._note(GroupFailed(worker.rank, f"{worker.name} sent what is no message {self._task}: {error}"))
            return False
        if message.kind == "failed":
            logger.error("rank %d %s:\n%s", worker.rank, worker.name, message.values["traceback"])
            told = GroupFailed(worker.rank, f"{worker.name} failed {self._task}: {message.values['reason']}")
            self._note(told, is_consequence=bool(message.values["is_consequence"]))
            return True
        with self._news:
            self._answers[worker.rank].append(message)
            self._news.notify_all()
        return True

    def _note(self, failure: GroupFailed, *, is_consequence: bool = False) -> None:
        """Note what has failed, which is the first cause, or the first consequence until a cause is known."""
        with self._news:
            known = self._cause
            if known is None or (known[0] and not is_consequence):
                self._cause = (time.monotonic() + GRACE if is_consequence else 0.0, failure)

    def _ended(self, worker: AnyWorker) -> GroupFailed:
        return GroupFailed(worker.rank, f"{worker.name} {worker.how_it_ended()} {self._task}")

    def _late(self, workers: Sequence[AnyWorker]) -> GroupFailed:
        """The failure of a deadline."""
        stopped = next((worker for worker in workers if worker.is_stopped), None)
        if stopped is not None:
            return GroupFailed(stopped.rank, f"{stopped.name} was stopped {self._task}")
        return GroupFailed(workers[0].rank, f"{workers[0].name} took too long {self._task}")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0][:500]
