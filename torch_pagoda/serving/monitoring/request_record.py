"""A record of one finished generation request, the source of its metrics, log line and trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..engine_process.wire import RequestTimes


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt of the request with its completions.

    Attributes:
        prompt_tokens: number of its tokens.
        cached_tokens: how many of them came from the prefix cache.
        output_tokens: tokens of each completion, as far as they were read.
        finish_reasons: the engine's (``wire.Delta``) for each completion; None: unfinished.
        times: the engine's times; None: unfinished.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: tuple[int, ...]
    finish_reasons: tuple[str | None, ...]
    times: RequestTimes | None = None

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean time between two tokens of a completion; None for a single token or an unfinished request."""
        if self.times is None or self.times.decode is None:
            return None
        gaps = self.times.num_generated_tokens - len(self.output_tokens)
        return self.times.decode * len(self.output_tokens) / gaps if gaps > 0 else None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One generation request after its end, however it ended; ``RequestWatch`` makes it.

    Attributes:
        request_id: untrusted text of bounded length.
        endpoint: the route's template.
        model: model name of the request (untrusted, too), or the default one.
        status: HTTP status; 499 if the client disconnected before the response.
        arrival: seconds since the epoch.
        seconds: from arrival to the end.
        key_name: name of the API key; None without keys.
        prompts: the submitted prompts, also if they were refused; empty if the body was refused.
        first_token_seconds: from arrival to the first delta with a token, in the API process.
        n: completions of each prompt.
        max_tokens: the requested limit; None: the rest of the context.
        temperature, top_p: the requested value, or the default.
        streamed: the response was sent as events.
        disconnected: the client closed the connection before the end.
        error_code: code of the error object, if any.
        trace_headers: ``traceparent`` and ``tracestate`` of the request.
    """

    request_id: str
    endpoint: str
    model: str
    status: int
    arrival: float
    seconds: float
    key_name: str | None = None
    prompts: tuple[PromptRecord, ...] = ()
    first_token_seconds: float | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    streamed: bool = False
    disconnected: bool = False
    error_code: str | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    def longest(self, phase: Literal["queue", "prefill", "decode"]) -> float | None:
        """Seconds of a phase of ``RequestTimes``, the longest of several prompts; None if there is none."""
        times = [getattr(prompt.times, phase) for prompt in self.prompts if prompt.times is not None]
        return max((seconds for seconds in times if seconds is not None), default=None)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all prompts."""
        return sum(prompt.prompt_tokens for prompt in self.prompts)

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of all prompts."""
        return sum(prompt.cached_tokens for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all completions."""
        return sum(sum(prompt.output_tokens) for prompt in self.prompts)

    @property
    def finish_reasons(self) -> tuple[str | None, ...]:
        """Finish reasons of all completions, prompt by prompt."""
        return tuple(reason for prompt in self.prompts for reason in prompt.finish_reasons)
