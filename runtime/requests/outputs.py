"""Outputs that a caller gets back: completions, metrics, pieces of a stream, progress, figures of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .request import FinishReason


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural logarithm) under the model, before temperature and penalties.

    Attributes:
        rank: 1 for the most likely token; among equals the lower token id comes first.
        decoded_token: its text by itself, where the engine has a tokenizer.
        added_text: what it added to the text of its completion, of generated tokens; those of all tokens make that
            text. "" for one that has none there, such as a special token, and for one whose character is completed
            by a later one.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    added_text: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt, up to now.

    Attributes:
        index: which of the ``n`` completions.
        text: the new text, without stop string and end-of-sequence token unless they were asked for; "" without a
            tokenizer.
        token_ids: generated ids, including the token that ended the text.
        logprobs: per token, id → log-probability and rank; None unless asked for.
        finish_reason: "stop" (EOS, stop token or string), "length", "cancelled", "timeout", "error"; None while it
            runs.
        stop_reason: the stop string or stop token id that ended it; None for EOS and for other reasons.
        error: one line that says why, when ``finish_reason`` is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """True if no more tokens will come."""
        return self.finish_reason is not None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the generated tokens' log-probabilities; None unless logprobs were asked for."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for token, entry in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request's events, in seconds of ``time.perf_counter``; None: not yet.

    Attributes:
        arrival_time: when it was handed in.
        first_scheduled_time: when its first step was planned.
        first_token_time: when its first token was there.
        finished_time: when it (the last of its ``n`` completions) ended.
        num_generated_tokens: of all completions.
        num_preemptions: times that a completion lost its blocks.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generated_tokens: int = 0
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Seconds per generated token after the first; completions of one prompt count together."""
        if self.finished_time is None or self.first_token_time is None or self.num_generated_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_generated_tokens - 1)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and what has been generated for it up to now.

    Attributes:
        request_id: what ``submit`` returned.
        prompt: its text; None when token ids were given.
        prompt_token_ids: its tokens.
        outputs: the ``n`` completions, by index.
        finished: whether all of them have ended.
        metrics: times and counts.
        prompt_logprobs: per prompt token, None for the first, else id → log-probability and rank: the token itself,
            then the most likely ones; shorter than the prompt while that is computed, None unless asked for.
        num_cached_tokens: leading tokens of the prompt that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class BeamSearchSequence:
    """A text that a beam search found.

    Attributes:
        text: without end-of-sequence token; "" without a tokenizer.
        token_ids: generated ids, including the end-of-sequence token.
        cumulative_logprob: sum of their log-probabilities.
        score: that divided by ``len(token_ids) ** length_penalty``; the best text has the highest.
        finish_reason: "stop" (end of sequence) or "length".
    """

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class BeamSearchOutput:
    """The texts that a beam search found for a prompt.

    Attributes:
        request_id: the engine's name for it.
        prompt: its text; None when token ids were given.
        prompt_token_ids: its tokens.
        sequences: ``beam_width`` finished texts, best first; fewer where the model allowed fewer, or where the search
            ended before its time.
        metrics: times and counts; the generated tokens are one for each step of each beam.
        error: one line that says why the search ended before its time; None if it did not.
        num_cached_tokens: leading tokens of the prompt that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    metrics: RequestMetrics
    error: str | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class StreamPiece:
    """The part of one completion that is new since the piece before.

    Attributes:
        text: new text; may be "" while a character or a possible stop string is incomplete.
        token_ids: new tokens.
        finished: no more pieces of this completion come.
        finish_reason, stop_reason, error: as in ``CompletionOutput``; set with the last piece.
        index: which of the ``n`` completions.
        logprobs: of the new tokens; None unless asked for.
        request_id: of the request, for ``cancel``.
        prompt_logprobs: as in ``RequestOutput``; with the first piece of the first completion, where asked for.
        num_cached_tokens: as in ``RequestOutput``.
        metrics: of the request; with the last piece of the last completion that ended.
    """

    text: str
    token_ids: list[int]
    finished: bool
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: str | None
    index: int
    logprobs: list[dict[int, Logprob]] | None
    request_id: str
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


class Progress(NamedTuple):
    """Progress of a ``generate`` call.

    Attributes:
        finished: prompts that are done.
        total: prompts.
        generated_tokens: tokens generated up to now, of all prompts and completions.
    """

    finished: int
    total: int
    generated_tokens: int
