"""The engine's side of the socket: read messages, run a step, send the news, repeat."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder

from ...runtime.batching.batcher import QueueFull
from ...runtime.batching.cache_events import AllBlocksCleared, BlocksStored, CacheEvents
from ...runtime.engine.engine import Engine
from ...runtime.requests.outputs import Logprob, RequestMetrics, StreamPiece
from ...runtime.requests.request_options import RequestOptions
from ...runtime.requests.sampling_params import SamplingParams
from .framing import FrameReader, FrameTooLong, FrameWriter
from .grammar_compiler import GrammarCompiler
from .kv_events import KvEventPublisher
from .wire import (
    EXIT_BAD_MESSAGE,
    EXIT_BROKEN,
    EXIT_DONE,
    WIRE_VERSION,
    Answer,
    Ask,
    CacheChange,
    Cancel,
    Delta,
    FromEngine,
    Hello,
    Refused,
    RequestTimes,
    Step,
    Submit,
    ToEngine,
    TokenLogprob,
)

logger = logging.getLogger(__name__)

MAX_UNSENT = 64 * 2**20
"""Bytes that may wait for the peer to read them; above this no step runs."""

_IDLE_SECONDS = 1.0
"""Between two looks at the other ranks of the model while no step runs."""
_STORE_SECONDS = 0.002
"""Between two looks at whether what somebody waits for is stored, while no step runs."""
_MAX_FAILURES = 3
_MAX_REASON = 10_000
"""Maximum characters of an error message, which may quote the request."""
_TOO_LONG = "the output of this request is too long to send; request fewer log-probabilities"


class Worker:
    """Runs an engine for the peer at the other end of a socket, until the peer closes it.

    Args:
        engine: used by nobody else meanwhile.
        sock: a connected stream socket; closed at the end.
        model: name or folder, for ``Hello``.
        default_params: for ``Hello``.
        reports_cache: send the changes of the prefix cache.
        publisher: publishes them, with the tokens of the blocks.
        stats_interval: seconds between two messages with ``stats``, while requests run.
        max_unsent: bytes that may wait for the peer; a single step may exceed it.
        stall_seconds: seconds that the peer may read nothing while more than that waits.
    """

    def __init__(
        self,
        engine: Engine,
        sock: socket.socket,
        *,
        model: str = "",
        default_params: Mapping[str, Any] | None = None,
        reports_cache: bool = False,
        publisher: KvEventPublisher | None = None,
        stats_interval: float = 0.25,
        max_unsent: int = MAX_UNSENT,
        stall_seconds: float = 10.0,
    ) -> None:
        self.engine = engine
        self.model = model
        self.default_params = dict(default_params or {})
        self.stats_interval = stats_interval
        self.max_unsent = max_unsent
        self.stall_seconds = stall_seconds
        self._sock = sock
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._decoder: Decoder[ToEngine] = Decoder(ToEngine)
        self._encoder = Encoder()
        self._prompts: dict[str, tuple[str, int]] = {}  # the engine's id → request id and index of the prompt
        self._unfinished: dict[str, set[str]] = {}  # request id → the engine's ids
        self._too_long: set[str] = set()
        self._refused: list[Refused] = []
        self._answers: list[Answer] = []
        self._storing: list[tuple[int, int]] = []  # call id, and blocks that must be stored before its answer
        self._compiler = GrammarCompiler(engine)
        self._stats_sent = 0.0
        self._was_busy = False
        self._reports_cache, self._publisher = reports_cache, publisher
        self._cache_events: CacheEvents | None = None
        if reports_cache or publisher is not None:
            self._cache_events = engine.watch_prefix_cache(with_tokens=publisher is not None)

    def run(self) -> int:
        """Run until the socket is closed or the engine cannot go on; returns the exit status of an engine process."""
        self._sock.setblocking(False)
        try:
            with selectors.DefaultSelector() as selector:
                return self._loop(selector)
        finally:
            self._sock.close()
            self._compiler.close()
            if self._publisher is not None:
                self._publisher.close()
            self.engine.cancel_many(list(self._prompts))
            with suppress(Exception):
                self.engine.step_pieces()  # nothing is left to run, but the engine forgets them

    def _loop(self, selector: selectors.BaseSelector) -> int:
        selector.register(self._sock, selectors.EVENT_READ)
        selector.register(self._compiler, selectors.EVENT_READ)
        self._send(self._hello())
        failures = 0
        idle = _IDLE_SECONDS if hasattr(self.engine.runner.program, "start_again") else None
        while True:
            if not self._writer.send(self._sock):
                return EXIT_DONE
            if self._writer.num_unsent > self.max_unsent and not self._drain():
                logger.error(
                    "the API process has not read %d waiting bytes for %g s; the engine exits",
                    self._writer.num_unsent,
                    self.stall_seconds,
                )
                return EXIT_BROKEN
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writer.num_unsent else 0)
            selector.modify(self._sock, events)
            seconds = _STORE_SECONDS if self._storing else idle
            ready = selector.select(0 if self.engine.has_unfinished() else seconds)
            if idle is not None and not self.engine.has_unfinished():
                self.engine.notice_failure()
            try:
                frames, is_open = self._reader.receive(self._sock)
                for frame in frames:
                    self._apply(self._decoder.decode(frame))
            except (DecodeError, FrameTooLong, RecursionError) as error:
                logger.error("received an invalid message (%s); the engine exits", error)
                return EXIT_BAD_MESSAGE
            if not is_open:
                return EXIT_DONE
            if any(key.fileobj is self._compiler for key, _ in ready):
                self._take_grammars()
            pieces: list[StreamPiece] = []
            if self.engine.has_unfinished():
                self._was_busy = True
                try:
                    pieces = self.engine.step_pieces()
                    failures = 0
                except Exception:
                    failures += 1
                    logger.exception("a step failed (%d in a row)", failures)
                    if failures == _MAX_FAILURES:
                        return EXIT_BROKEN
            self._answer_stored()
            self._send_news([self._delta(piece) for piece in pieces])
            if self.engine.device_lost is not None and not self.engine.has_unfinished():
                logger.error("%s; the engine exits", self.engine.device_lost)
                self._drain(0)
                return EXIT_BROKEN

    def _hello(self) -> Hello:
        engine = self.engine
        return Hello(
            version=WIRE_VERSION,
            max_model_len=engine.max_model_len,
            vocab_size=engine.limits.vocab_size,
            max_num_seqs=engine.batcher.max_num_seqs,
            max_queue=engine.batcher.max_queue,
            default_params=self.default_params,
            model=self.model,
            device=str(engine.runner.program.device),
            stats=engine.stats(),
        )

    def _drain(self, limit: int | None = None) -> bool:
        """Wait until at most ``limit`` bytes, by default ``max_unsent``, are unsent; returns False if the peer stops
        reading."""
        limit = self.max_unsent if limit is None else limit
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_WRITE)
            while self._writer.num_unsent > limit:
                before = self._writer.num_unsent
                selector.select(self.stall_seconds)
                if not self._writer.send(self._sock):
                    return True  # it is gone, which the loop notices
                if self._writer.num_unsent == before:
                    return False
        return True

    def _apply(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            names = [name for known in message.request_ids for name in self._unfinished.get(known, ())]
            self.engine.cancel_many(names)
            for known in message.request_ids:
                if self._compiler.forget(known):
                    self._refuse(known, "invalid", "cancelled before its grammar was compiled")
        elif message.what == "stored":
            self._storing.append((message.call_id, self.engine.num_stored()))
        else:
            self._answers.append(self._answer(message))

    def _answer_stored(self) -> None:
        """Answer those that wait until what was computed before they asked is stored."""
        try:
            while self._storing and self.engine.is_stored(self._storing[0][1]):
                self._answers.append(Answer(self._storing.pop(0)[0]))
        except Exception:
            logger.exception("storing blocks failed")
            self._answers += [Answer(call_id, error="storing blocks failed") for call_id, _ in self._storing]
            self._storing.clear()

    def _take_grammars(self) -> None:
        """Queue the submissions whose grammars are compiled."""
        for submit, refusal in self._compiler.done():
            if refusal is None:
                self._submit(submit, is_compiled=True)
            else:
                self._refuse(submit.request_id, "invalid", refusal)

    def _submit(self, message: Submit, is_compiled: bool = False) -> None:
        """Queue the prompts of a submission, or first have its grammar compiled."""
        request_id = message.request_id
        names = [f"{request_id}/{i}" for i in range(len(message.prompts))]
        try:
            if not names:
                raise ValueError("prompts=[] is empty; give at least one prompt")
            params = SamplingParams(**message.params)
            if not is_compiled and not self.engine.has_grammar(params):
                self._compiler.compile(message, params)
                return
            options = RequestOptions(**message.options)
            self.engine.submit_many(message.prompts, params, names, options, final_only=not message.streams)
        except QueueFull as error:
            self._refuse(request_id, "queue_full", str(error))
        except (ValueError, TypeError) as error:
            self._refuse(request_id, "invalid", str(error))
        except Exception:
            logger.exception("failed to queue a submission")
            self._refuse(request_id, "invalid", "the engine failed to queue this request")
        else:
            self._prompts.update({name: (request_id, i) for i, name in enumerate(names)})
            self._unfinished[request_id] = set(names)

    def _refuse(self, request_id: str, code: str, message: str) -> None:
        self._refused.append(Refused(request_id, code, message[:_MAX_REASON]))

    def _answer(self, ask: Ask) -> Answer:
        value: Any = None
        try:
            if ask.what == "stats":
                value = self.engine.stats()
            elif ask.what == "profile":
                value = self.engine.profile().to_dict()
            elif ask.what == "reset_prefix_cache":
                self.engine.reset_prefix_cache()
            elif ask.what != "ping":
                return Answer(ask.call_id, error=f"what={ask.what!r} is unknown")
        except Exception:
            logger.exception("%s failed", ask.what)
            return Answer(ask.call_id, error=f"{ask.what} failed")
        return Answer(ask.call_id, value)

    def _delta(self, piece: StreamPiece) -> Delta:
        """The delta of an output; after a request's last one, forget the request."""
        name, metrics = piece.request_id, piece.metrics
        request_id, prompt_index = self._prompts[name]
        delta = Delta(
            request_id,
            prompt_index,
            piece.index,
            piece.text,
            piece.token_ids,
            None if piece.logprobs is None else [_entries(entry) for entry in piece.logprobs],
            piece.finish_reason,
            piece.stop_reason,
            piece.error,
        )
        if piece.prompt_logprobs is not None:
            delta.prompt_logprobs = [None if entry is None else _entries(entry) for entry in piece.prompt_logprobs]
        if piece.finished:
            delta.num_cached_tokens = piece.num_cached_tokens
            if name in self._too_long:
                delta.finish_reason, delta.error = "error", _TOO_LONG
        if metrics is not None:
            delta.times = _times(metrics)
            self._too_long.discard(name)
            del self._prompts[name]
            unfinished = self._unfinished[request_id]
            unfinished.discard(name)
            if not unfinished:
                del self._unfinished[request_id]
        return delta

    def _send_news(self, deltas: list[Delta]) -> None:
        """Queue a message for the socket, if there is news."""
        stats = None
        is_busy = self.engine.has_unfinished()
        now = time.monotonic()
        if now - self._stats_sent >= self.stats_interval if is_busy else self._was_busy:
            stats, self._stats_sent, self._was_busy = self.engine.stats(), now, is_busy
        refused, self._refused = self._refused, []
        answers, self._answers = self._answers, []
        cache = self._cache_changes()
        if deltas or refused or answers or stats is not None or cache:
            self._put_step(Step(now, deltas, refused, answers, stats, cache))

    def _cache_changes(self) -> list[CacheChange]:
        """The changes of the prefix cache since the last call, after publishing them."""
        events = [] if self._cache_events is None else self._cache_events.take()
        if events and self._publisher is not None:
            self._publisher.publish(events)
        if not self._reports_cache:
            return []
        return [
            CacheChange(False)
            if isinstance(event, AllBlocksCleared)
            else CacheChange(isinstance(event, BlocksStored), event.hashes)
            for event in events
        ]

    def _put_step(self, step: Step) -> None:
        """Queue a step for the socket, split into several messages if it is too long for one."""
        try:
            self._send(step)
            return
        except FrameTooLong:
            pass
        deltas, refused = step.deltas, step.refused
        if half := len(deltas) // 2:
            self._put_step(Step(step.time, deltas[:half]))
            self._put_step(Step(step.time, deltas[half:], refused, step.answers, step.stats, step.cache))
        elif half := len(refused) // 2:
            self._put_step(Step(step.time, [], refused[:half]))
            self._put_step(Step(step.time, deltas, refused[half:], step.answers, step.stats, step.cache))
        elif deltas and (deltas[0].logprobs or deltas[0].prompt_logprobs or deltas[0].text):
            self._put_step(
                Step(step.time, [self._shortened(deltas[0])], refused, step.answers, step.stats, step.cache)
            )
        else:
            answers = [Answer(answer.call_id, error="the answer is too long to send") for answer in step.answers]
            self._put_step(Step(step.time, deltas, refused, answers, step.stats, step.cache))

    def _shortened(self, delta: Delta) -> Delta:
        """A delta that replaces one too long to send; its request ends with an error."""
        name = f"{delta.request_id}/{delta.prompt_index}"
        if delta.finish_reason is None:
            self._too_long.add(name)
            self.engine.cancel_many([name])
        short = Delta(delta.request_id, delta.prompt_index, delta.index, "", [], times=delta.times)
        if delta.finish_reason is not None:
            short.finish_reason, short.error = "error", _TOO_LONG
        return short

    def _send(self, message: FromEngine) -> None:
        self._writer.put(self._encoder.encode(message))


def _entries(entry: Mapping[int, Logprob]) -> list[TokenLogprob]:
    return [
        TokenLogprob(token, logprob.logprob, logprob.rank, logprob.decoded_token or "", logprob.added_text)
        for token, logprob in entry.items()
    ]


def _times(metrics: RequestMetrics) -> RequestTimes:
    began, first, ended = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
    computed = first if first is not None else ended
    return RequestTimes(
        queue=metrics.time_in_queue,
        prefill=None if began is None or computed is None else computed - began,
        decode=None if first is None or ended is None else ended - first,
        num_generated_tokens=metrics.num_generated_tokens,
        num_preemptions=metrics.num_preemptions,
    )
