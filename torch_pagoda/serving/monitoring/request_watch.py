"""Collects the times and tokens of one running request, and makes its record at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from ..engine_process.wire import Delta, RequestTimes
from .request_record import PromptRecord, RequestRecord


class TakesLatencies(Protocol):
    """Receives times between tokens while a request runs: ``ServerMetrics``."""

    def observe_inter_token_latency(self, seconds: float, count: int = 1) -> None:
        """Count ``count`` times of ``seconds`` each."""
        ...


class RequestWatch:
    """Counts tokens and takes times of one HTTP generation request.

    Create it when the request arrives, even if its body may be refused; call ``submitted`` when its prompts are
    known, ``saw`` after every ``DeltaStream.next``, and ``finish`` once in any case::

        watch = RequestWatch(metrics, request_id=…, endpoint="/v1/completions", model=…, key_name=…)
        watch.submitted([len(ids) for ids in prompts], n=2, max_tokens=16, streamed=True)
        while not done:
            deltas = await stream.next()
            watch.saw(deltas)
        record = watch.finish(status=200)
        metrics.observe(record)
        request_log.write(record)
    """

    def __init__(
        self,
        latencies: TakesLatencies,
        *,
        request_id: str,
        endpoint: str,
        model: str,
        key_name: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        self._latencies = latencies
        self._arrival = time.time()
        self._begin = time.monotonic()
        self._first_token: float | None = None
        self.request_id, self._endpoint, self.model, self._key_name = request_id, endpoint, model, key_name
        self._trace_headers = dict(trace_headers or {})
        self._prompts: list[_PromptWatch] = []
        self._n = 1
        self._max_tokens: int | None = None
        self._temperature: float | None = None
        self._top_p: float | None = None
        self._streamed = False

    def submitted(
        self,
        prompt_tokens: Sequence[int],
        *,
        n: int,
        max_tokens: int | None,
        streamed: bool,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> None:
        """Record the submission: the length of each prompt, and the parameters."""
        self._prompts = [_PromptWatch(length, n) for length in prompt_tokens]
        self._n, self._max_tokens, self._streamed = n, max_tokens, streamed
        self._temperature, self._top_p = temperature, top_p

    def saw(self, deltas: Sequence[Delta]) -> None:
        """Count new deltas; their time is now."""
        now = time.monotonic()
        for delta in deltas:
            prompt = self._prompts[delta.prompt_index]
            tokens = len(delta.token_ids)
            if tokens:
                if self._first_token is None:
                    self._first_token = now
                before = prompt.last_token[delta.index]
                if before is not None:
                    self._latencies.observe_inter_token_latency((now - before) / tokens, tokens)
                else:
                    prompt.unseen_gaps += tokens - 1
                prompt.last_token[delta.index] = now
                prompt.output_tokens[delta.index] += tokens
            if delta.finish_reason is not None:
                prompt.finish_reasons[delta.index] = delta.finish_reason
                prompt.cached_tokens = max(prompt.cached_tokens, delta.num_cached_tokens)
            if delta.times is not None:
                prompt.times = delta.times
                self._observe_unseen(prompt)

    def _observe_unseen(self, prompt: _PromptWatch) -> None:
        """Count the times between tokens of one delta, as the engine's mean: only the engine saw them one by one."""
        mean = prompt.record().seconds_per_output_token
        if mean is not None and prompt.unseen_gaps:
            self._latencies.observe_inter_token_latency(mean, prompt.unseen_gaps)
            prompt.unseen_gaps = 0

    def finish(self, *, status: int, disconnected: bool = False, error_code: str | None = None) -> RequestRecord:
        """Record the end; returns the record."""
        return RequestRecord(
            request_id=self.request_id,
            endpoint=self._endpoint,
            model=self.model,
            status=status,
            arrival=self._arrival,
            seconds=time.monotonic() - self._begin,
            key_name=self._key_name,
            prompts=tuple(prompt.record() for prompt in self._prompts),
            first_token_seconds=None if self._first_token is None else self._first_token - self._begin,
            n=self._n,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            top_p=self._top_p,
            streamed=self._streamed,
            disconnected=disconnected,
            error_code=error_code,
            trace_headers=self._trace_headers,
        )


class _PromptWatch:
    """What has arrived of one prompt."""

    __slots__ = ("cached_tokens", "finish_reasons", "last_token", "length", "output_tokens", "times", "unseen_gaps")

    def __init__(self, length: int, n: int) -> None:
        self.length = length
        self.cached_tokens = 0
        self.output_tokens = [0] * n
        self.last_token: list[float | None] = [None] * n
        self.finish_reasons: list[str | None] = [None] * n
        self.times: RequestTimes | None = None
        self.unseen_gaps = 0
        """Seconds between tokens of a completion's first delta."""

    def record(self) -> PromptRecord:
        return PromptRecord(
            self.length, self.cached_tokens, tuple(self.output_tokens), tuple(self.finish_reasons), self.times
        )
