"""One generation request: its submission, and the pieces of its choices, streamed or not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ...runtime.structured.state import CANNOT_GO_ON
from ..engine_process.client import DeltaStream, EngineDied, EngineUnavailable, RequestRefused
from ..engine_process.wire import Delta, Submit, TokenLogprob
from ..formats.events import ContentDelta, Event, ReasoningDelta, ToolCall, merge_events
from ..formats.format import AnswerParser
from ..http.errors import ApiError, from_value_error
from ..monitoring.request_watch import RequestWatch
from .admission import Place, Ticket, of_unavailable, unavailable
from .front import Front
from .prompts import Prompt
from .usage import CachedTokens, Usage, UsageSoFar

logger = logging.getLogger(__name__)

ChoiceEnd: TypeAlias = Literal["stop", "length", "tool_calls"]
"""OpenAI's ``finish_reason``."""

StopReason: TypeAlias = str | int | None
"""The stop string or token that ended a choice, ``"timeout"`` or ``"shutdown"``."""

Left = Literal["disconnect", "stall"]
"""Why a response has no reader any more."""


@dataclass(frozen=True)
class Ask:
    """A generation request, ready for the engine.

    Attributes:
        id: id of the response and of the submission.
        request_id: id of the HTTP request, for logs.
        prompts: at least one.
        params: fields of ``SamplingParams``.
        options: fields of ``RequestOptions``.
        streams: deliver pieces as they arise.
        make_parser: makes the parser of a choice's text; None: all text is content.
        parallel_tool_calls: allow several calls in a choice; else drop what follows the first one.
    """

    id: str
    request_id: str
    prompts: list[Prompt]
    params: dict[str, Any]
    options: dict[str, Any]
    streams: bool
    make_parser: Callable[[], AnswerParser] | None = None
    parallel_tool_calls: bool = True

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return int(self.params.get("n") or 1)

    @property
    def num_choices(self) -> int:
        """Choices of all prompts; choice ``i`` belongs to prompt ``i // n``."""
        return len(self.prompts) * self.n

    @property
    def num_completions(self) -> int:
        """Completions that run; with ``best_of``, more than there are choices."""
        return len(self.prompts) * int(self.params.get("best_of") or self.n)


@dataclass(slots=True)
class Piece:
    """The new part of one choice.

    Attributes:
        choice: index of the choice.
        text: new content.
        reasoning: new reasoning.
        tool_calls: complete ones.
        parsed: content, reasoning and calls in the order of the text; None: all text is content.
        token_ids: new tokens.
        logprobs: their log-probabilities.
        finish_reason, stop_reason: with the last piece.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None
    finish_reason: ChoiceEnd | None = None
    stop_reason: StopReason = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    parsed: list[Event] | None = None

    @property
    def events(self) -> list[Event]:
        """New events, in the order of the text."""
        if self.parsed is not None:
            return self.parsed
        return [ContentDelta(self.text)] if self.text else []


class Generation:
    """One request in progress, from admission to the end of its last choice.

    Call ``start``, then ``next`` until ``finished``; call ``close`` in any case.

    Args:
        front: the server's state.
        ask: the request.
        watch: its watch.
        place: its reservation during preparation.
    """

    def __init__(self, front: Front, ask: Ask, watch: RequestWatch, place: Place | None = None) -> None:
        self.front, self.ask, self.watch = front, ask, watch
        self._place = place
        self.left: Left | None = None
        """Set when the response has no reader any more."""
        self.on_cut: Callable[[], object] | None = None
        """Called when the server shuts down."""
        self.prompt_logprobs: list[list[list[TokenLogprob] | None] | None] = [None] * len(ask.prompts)
        """Cached tokens of each prompt, once known."""
        self.num_tokens = 0
        """Generated tokens of all choices."""
        self._cached = [0] * len(ask.prompts)
        self._unfinished = set(range(ask.num_choices))
        self._spoken: set[int] = set()
        self._called: set[int] = set()
        self._parsers = {} if ask.make_parser is None else {i: ask.make_parser() for i in range(ask.num_choices)}
        self._ticket: Ticket | None = None
        self._stream: DeltaStream | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._is_cut = False

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    def start(self) -> None:
        """Submit the prompts to the engine.

        Raises:
            ApiError: 429 or 503.
        """
        ask, params = self.ask, self.ask.params
        lengths = [len(prompt.token_ids) for prompt in ask.prompts]
        self.watch.submitted(
            lengths,
            n=ask.n,
            max_tokens=params.get("max_tokens"),
            streamed=ask.streams,
            temperature=params.get("temperature"),
            top_p=params.get("top_p"),
        )
        self._ticket = self.front.admission.enter(ask.num_completions, sum(lengths), self._place)
        self.front.generations.add(self)
        submit = Submit(ask.id, [p.token_ids for p in ask.prompts], params, ask.options, ask.streams)
        try:
            self._stream = self.front.client.submit(submit)
        except EngineUnavailable as error:
            raise of_unavailable(error) from error

    async def next(self) -> list[Piece]:
        """Wait for news of one or more choices.

        Raises:
            ApiError: the engine refused the request, failed at it, or ended.
        """
        assert self._stream is not None
        if self._is_cut:
            return self._cut_short()
        self._waiting = asyncio.current_task()
        try:
            deltas = await self._stream.next()
        except asyncio.CancelledError:
            if self.left is not None or not self._is_cut:
                raise
            assert self._waiting is not None
            self._waiting.uncancel()
            return self._cut_short()
        except RequestRefused as error:
            assert self._ticket is not None
            self._ticket.not_taken()
            if error.code == "queue_full":
                raise self.front.admission.refused_by_engine(str(error)) from error
            raise from_value_error(error) from error
        except EngineDied as error:
            raise unavailable("engine_dead", "The engine ended while running this request.", 5) from error
        finally:
            self._waiting = None
        if not deltas:
            raise RuntimeError(f"the engine ended {self.ask.id} without finishing {sorted(self._unfinished)}")
        self.watch.saw(deltas)
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[delta.prompt_index] = delta.prompt_logprobs
        return [self._piece(delta) for delta in deltas]

    def usage_so_far(self) -> UsageSoFar:
        """OpenAI's object ``usage``, so far."""
        prompt = sum(len(prompt.token_ids) for prompt in self.ask.prompts)
        return UsageSoFar(prompt, self.num_tokens, prompt + self.num_tokens)

    def usage(self) -> Usage:
        """OpenAI's object ``usage``, at the end."""
        so_far = self.usage_so_far()
        cached = CachedTokens(sum(self._cached))
        return Usage(so_far.prompt_tokens, so_far.completion_tokens, so_far.total_tokens, cached)

    def cut(self) -> None:
        """End with the output so far, because the server shuts down."""
        self._is_cut = True
        if self._waiting is not None:
            self._waiting.cancel()
        if self.on_cut is not None:
            self.on_cut()

    def close(self) -> None:
        """End the request; cancel what has not finished in the engine."""
        if self._stream is not None and self._unfinished:
            self._stream.cancel()
        if self._ticket is not None:
            self._ticket.close()
        for _ in range(sum(parser.malformed for parser in self._parsers.values())):
            self.front.metrics.tool_parse_failed()
        self.front.generations.discard(self)

    def _piece(self, delta: Delta) -> Piece:
        choice = delta.prompt_index * self.ask.n + delta.index
        self.num_tokens += len(delta.token_ids)
        if delta.token_ids:
            self._spoken.add(choice)
        piece = Piece(choice, delta.text, delta.token_ids, delta.logprobs)
        if delta.finish_reason is not None:
            self._cached[delta.prompt_index] = max(self._cached[delta.prompt_index], delta.num_cached_tokens)
            piece.finish_reason, piece.stop_reason = self._finish(delta)
            self._end(choice)
        if self._parsers:
            self._parse(piece)
        return piece

    def _finish(self, delta: Delta) -> tuple[ChoiceEnd, StopReason]:
        reason = delta.finish_reason
        if reason == "error" and delta.error is not None and delta.error.startswith(CANNOT_GO_ON):
            raise ApiError(400, "invalid_schema", f"{delta.error}; change it", param="structured_outputs")
        if reason == "error":
            logger.error("request %s failed in the engine: %s", self.ask.request_id, delta.error)
            text = f"Internal engine error. See the server log for request {self.ask.request_id}."
            raise ApiError(500, "internal_error", text)
        if reason == "timeout":
            if not self._spoken:
                raise ApiError(504, "deadline_exceeded", "The request reached its deadline before the first token.")
            return "length", "timeout"
        if reason == "cancelled":
            return "length", "shutdown"
        assert reason is not None
        return reason, delta.stop_reason

    def _parse(self, piece: Piece) -> None:
        parser = self._parsers[piece.choice]
        events = parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += parser.finish()
        events = [event for event in events if not isinstance(event, ToolCall) or self._takes_call(piece.choice)]
        piece.parsed = merge_events(events)
        piece.text = "".join(event.text for event in events if isinstance(event, ContentDelta))
        piece.reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        piece.tool_calls = [event for event in events if isinstance(event, ToolCall)]
        if piece.finish_reason == "stop" and piece.choice in self._called:
            piece.finish_reason = "tool_calls"

    def _takes_call(self, choice: int) -> bool:
        """Whether a call that arrives now counts; records that the choice has one."""
        if choice in self._called and not self.ask.parallel_tool_calls:
            return False
        self._called.add(choice)
        return True

    def _cut_short(self) -> list[Piece]:
        if not self.ask.streams:
            raise unavailable("draining", "The server shut down before this request finished.", 5)
        assert self._stream is not None
        self._stream.cancel()
        pieces = []
        for choice in sorted(self._unfinished):
            piece = Piece(choice, "", [], finish_reason="length", stop_reason="shutdown")
            if self._parsers:
                self._parse(piece)
            pieces.append(piece)
            self._end(choice)
        return pieces

    def _end(self, choice: int) -> None:
        self._unfinished.discard(choice)
        assert self._ticket is not None
        self._ticket.completion_ended()
