"""Metrics of one server in Prometheus's formats, under vLLM's names, so that vLLM's dashboards work unchanged.

Requests are counted here when they end; the engine's statistics are read from ``EngineClient.stats`` at each scrape.
Each server has a registry of its own. Call everything from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import Response

from ..engine_process.client import EngineClient
from .engine_families import MetricsPrefix, engine_families, histogram_family, labeled, own_families, renamed
from .histogram import (
    COUNTS_OF_N,
    FIRST_TOKEN_SECONDS,
    HTTP_SECONDS,
    REQUEST_SECONDS,
    SHORT_SECONDS,
    TOKEN_SECONDS,
    Histogram,
    one_two_five,
)
from .request_record import PromptRecord, RequestRecord

RefusalReason = Literal[
    "queue_full",
    "too_many_tokens_queued",
    "too_many_connections",
    "loading",
    "draining",
    "engine_dead",
    "deadline_exceeded",
    "body_too_large",
    "body_timeout",
    "invalid_api_key",
    "other",
]
"""Why a request was refused: the ``code`` of the error object where it is one of these, else ``"other"``."""

METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"})
MAX_HANDLERS = 64
"""Routes with a label of their own."""

_FINISHED = {"stop": "stop", "length": "length", "error": "error"}
"""The engine's finish reason → vLLM's ``finished_reason``; all others are ``"abort"``."""


class ServerMetrics:
    """All metrics of a server.

    Args:
        client: the engine's client; its statistics are read at each scrape.
        model_name: value of the label ``model_name``, the server's first model name.
        max_model_len: limits the buckets of token counts.
        prefix: ``"vllm"``: vLLM's metrics are named ``vllm:…``; ``"pagoda"``: ``pagoda:…``; ``"both"``: as
            ``"vllm"``, but gauges that autoscalers read have both names. Metrics that vLLM lacks are always
            ``pagoda:…``.
    """

    def __init__(
        self, client: EngineClient, model_name: str, max_model_len: int, prefix: MetricsPrefix = "both"
    ) -> None:
        if prefix not in get_args(MetricsPrefix):
            raise ValueError(f"prefix={prefix!r}: use one of {get_args(MetricsPrefix)}")
        self._client = client
        self._model_name = model_name
        self._prefix = prefix
        tokens = one_two_five(max_model_len)
        self._requests = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN_SECONDS),
            "inter_token_latency_seconds": Histogram(TOKEN_SECONDS),
            "request_time_per_output_token_seconds": Histogram(TOKEN_SECONDS),
            "e2e_request_latency_seconds": Histogram(REQUEST_SECONDS),
            "request_queue_time_seconds": Histogram(REQUEST_SECONDS),
            "request_prefill_time_seconds": Histogram(REQUEST_SECONDS),
            "request_decode_time_seconds": Histogram(REQUEST_SECONDS),
            "request_inference_time_seconds": Histogram(REQUEST_SECONDS),
            "request_prompt_tokens": Histogram(tokens),
            "request_generation_tokens": Histogram(tokens),
            "request_max_num_generation_tokens": Histogram(tokens),
            "request_params_n": Histogram(COUNTS_OF_N),
            "request_params_max_tokens": Histogram(tokens),
        }
        self._http_first_token = Histogram(FIRST_TOKEN_SECONDS)
        self._event_loop_lag = Histogram(SHORT_SECONDS)
        self._grammar_compile = Histogram(SHORT_SECONDS)
        self._finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self._refused: Counter[str] = Counter({reason: 0 for reason in get_args(RefusalReason)})
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._http_seconds: dict[tuple[str, str], Histogram] = {}
        self._handlers: set[str] = set()
        self._num_disconnects = 0
        self._num_tool_parse_failures = 0
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(self._families))

    def observe(self, record: RequestRecord) -> None:
        """Count a finished generation request; once per request, however it ended.

        A request refused before any computation counts in ``refused`` and ``observe_http`` only.
        """
        if record.disconnected:
            self._num_disconnects += 1
        if record.first_token_seconds is not None:
            self._http_first_token.observe(record.first_token_seconds)
        for prompt in record.prompts:
            if prompt.times is not None or any(prompt.output_tokens) or record.disconnected:
                self._observe_prompt(record, prompt)

    def _observe_prompt(self, record: RequestRecord, prompt: PromptRecord) -> None:
        histograms = self._requests
        histograms["request_prompt_tokens"].observe(prompt.prompt_tokens)
        histograms["request_max_num_generation_tokens"].observe(max(prompt.output_tokens, default=0))
        histograms["request_params_n"].observe(record.n)
        if record.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(record.max_tokens)
        for tokens, reason in zip(prompt.output_tokens, prompt.finish_reasons, strict=True):
            self._finished[_FINISHED.get(reason or "", "abort")] += 1
            histograms["request_generation_tokens"].observe(tokens)
        times = prompt.times
        if times is None:
            histograms["e2e_request_latency_seconds"].observe(record.seconds)
            return
        queue, prefill, decode = times.queue, times.prefill, times.decode
        histograms["e2e_request_latency_seconds"].observe((queue or 0) + (prefill or 0) + (decode or 0))
        if queue is not None:
            histograms["request_queue_time_seconds"].observe(queue)
        if prefill is not None:
            histograms["request_prefill_time_seconds"].observe(prefill)
            histograms["request_inference_time_seconds"].observe(prefill + (decode or 0))
            histograms["time_to_first_token_seconds"].observe((queue or 0) + prefill)
        if decode is not None:
            histograms["request_decode_time_seconds"].observe(decode)
            # As vLLM has it, 0 for a single token: so its count is that of the prompts.
            histograms["request_time_per_output_token_seconds"].observe(prompt.seconds_per_output_token or 0.0)

    def observe_inter_token_latency(self, seconds: float, count: int = 1) -> None:
        """Count times between two tokens of a running completion; ``RequestWatch`` calls it."""
        self._requests["inter_token_latency_seconds"].observe(seconds, count)

    def observe_http(self, handler: str | None, method: str, status: int, seconds: float) -> None:
        """Count a finished response; as in vLLM, health checks and scrapes do not count.

        Args:
            handler: the route's template; None: no route matched. Raw paths would make one label each: beyond
                ``MAX_HANDLERS``, handlers are ``"other"``.
            method: unknown methods count as ``"other"``.
            status: counted by class, ``"4xx"``, as in vLLM.
            seconds: until the last byte was written.
        """
        handler = handler or "none"
        if handler not in self._handlers:
            if len(self._handlers) < MAX_HANDLERS:
                self._handlers.add(handler)
            else:
                handler = "other"
        method = method if method in METHODS else "other"
        self._http[handler, method, f"{status // 100}xx" if 100 <= status <= 599 else "other"] += 1
        self._http_seconds.setdefault((handler, method), Histogram(HTTP_SECONDS)).observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a refused request; see ``RefusalReason``."""
        self._refused[reason if reason in self._refused else "other"] += 1

    def observe_grammar(self, seconds: float) -> None:
        """Count the compilation time of a grammar."""
        self._grammar_compile.observe(seconds)

    def tool_parse_failed(self) -> None:
        """Count a tool call that could not be parsed."""
        self._num_tool_parse_failures += 1

    async def sample_event_loop_lag(self, interval: float = 0.5) -> None:
        """Measure, until cancelled, how late the event loop wakes up; ``interval`` in seconds."""
        while True:
            due = time.monotonic() + interval
            await asyncio.sleep(interval)
            self._event_loop_lag.observe(max(0.0, time.monotonic() - due))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics as text, and its content type: OpenMetrics if the header ``Accept`` requests it."""
        if "application/openmetrics-text" in accept:
            # The client library's own choice of an encoder turns the colons of these (valid) names to underscores.
            text = openmetrics.generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8)
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def _families(self) -> Iterable[Metric]:
        labels = {"model_name": self._model_name, "engine": "0"}
        families = [
            *engine_families(self._client.stats_of_engines, self._model_name),
            *(histogram_family(f"vllm:{name}", _HELP[name], [(labels, h)]) for name, h in self._requests.items()),
            labeled(
                CounterMetricFamily,
                "vllm:request_success",
                "Finished completions by finish reason.",
                [({**labels, "finished_reason": reason}, count) for reason, count in self._finished.items()],
            ),
        ]
        yield from renamed(families, self._prefix)
        yield from own_families(self._client.stats)
        yield from self._own_families(labels)
        yield from self._http_families()

    def _own_families(self, labels: dict[str, str]) -> Iterable[Metric]:
        yield histogram_family(
            "pagoda:http_ttft_seconds",
            "Time from a request's arrival to its first token, in the API process.",
            [(labels, self._http_first_token)],
        )
        yield histogram_family(
            "pagoda:event_loop_lag_seconds", "Wake-up delay of the API's event loop.", [({}, self._event_loop_lag)]
        )
        yield histogram_family(
            "pagoda:grammar_seconds",
            "Compilation time of grammars.",
            [({"part": "compile"}, self._grammar_compile)],
        )
        yield labeled(
            CounterMetricFamily,
            "pagoda:requests_refused",
            "Refused requests by reason.",
            [({"reason": reason}, count) for reason, count in self._refused.items()],
        )
        yield labeled(
            CounterMetricFamily,
            "pagoda:disconnects",
            "Requests whose client disconnected before the end.",
            [({}, self._num_disconnects)],
        )
        yield labeled(
            CounterMetricFamily,
            "pagoda:tool_parse_failures",
            "Tool calls whose text could not be parsed.",
            [({}, self._num_tool_parse_failures)],
        )

    def _http_families(self) -> Iterable[Metric]:
        yield labeled(
            CounterMetricFamily,
            "http_requests",
            "Responses by route, method and class of status.",
            [({"handler": h, "method": m, "status": s}, count) for (h, m, s), count in self._http.items()],
        )
        yield histogram_family(
            "http_request_duration_seconds",
            "Time from a request's head to the end of its response.",
            [({"handler": h, "method": m}, histogram) for (h, m), histogram in self._http_seconds.items()],
        )


def metrics_endpoint(metrics: ServerMetrics) -> Callable[[Request], Awaitable[Response]]:
    """Make the handler of ``GET /metrics``: ``Route("/metrics", metrics_endpoint(metrics))``."""

    async def endpoint(request: Request) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    return endpoint


class _Collector:
    """Families for a registry, built at each scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()

    def describe(self) -> Iterable[Metric]:
        """Empty: the registry would otherwise scrape for the names before the engine is ready."""
        return ()


_HELP = {
    "time_to_first_token_seconds": "Time from a prompt's arrival at the engine to its first token.",
    "inter_token_latency_seconds": "Time between two tokens of a completion.",
    "request_time_per_output_token_seconds": "Mean time between two tokens of a prompt's completions.",
    "e2e_request_latency_seconds": "Time from a prompt's arrival at the engine to the end of its completions.",
    "request_queue_time_seconds": "Time from a prompt's arrival at the engine to its first step.",
    "request_prefill_time_seconds": "Time from a prompt's first step to its first token.",
    "request_decode_time_seconds": "Time from a prompt's first token to the end of its completions.",
    "request_inference_time_seconds": "Time from a prompt's first step to the end of its completions.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of a completion.",
    "request_max_num_generation_tokens": "Tokens of a prompt's longest completion.",
    "request_params_n": "Parameter n of a request.",
    "request_params_max_tokens": "Parameter max_tokens of a request.",
}
