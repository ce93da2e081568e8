"""Traces of requests with OpenTelemetry, which is imported only if an endpoint is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACE_HEADERS = ("traceparent", "tracestate")
"""Request headers kept in ``RequestRecord.trace_headers``."""


class RequestTracer:
    """One span ``llm_request`` per generation request, with vLLM's attributes.

    Args:
        exporter: receives the spans, on a thread of its own.
        service_name: name of the resource.
    """

    def __init__(self, exporter: SpanExporter, service_name: str = "pagoda") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("torch_pagoda.serving")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, endpoint: str) -> RequestTracer:
        """A tracer that sends to an OTLP collector over HTTP, ``http://host:4318/v1/traces``.

        Raises:
            ImportError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ImportError(
                f"trace_endpoint={endpoint!r} needs OpenTelemetry: pip install 'torch-pagoda[otel]'"
            ) from error
        return cls(OTLPSpanExporter(endpoint=endpoint))

    def export(self, record: RequestRecord) -> None:
        """Make the span of a finished request; it continues the trace that the request's headers name."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(record.trace_headers),
            kind=SpanKind.SERVER,
            attributes=span_attributes(record),
            start_time=int(record.arrival * 1e9),
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error_code))
        span.end(end_time=int((record.arrival + record.seconds) * 1e9))

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        self._provider.force_flush(timeout_millis=3000)
        self._provider.shutdown()


def span_attributes(record: RequestRecord) -> dict[str, Any]:
    """Attributes of a request's span; times in seconds, the longest of several prompts."""
    prefill, decode = record.longest("prefill"), record.longest("decode")
    inference = None if prefill is None else prefill + (decode or 0.0)
    attributes: dict[str, Any] = {
        "gen_ai.response.model": record.model,
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.n": record.n,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": record.temperature,
        "gen_ai.request.top_p": record.top_p,
        "gen_ai.usage.num_sequences": len(record.finish_reasons),
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.latency.time_in_queue": record.longest("queue"),
        "gen_ai.latency.time_to_first_token": record.first_token_seconds,
        "gen_ai.latency.e2e": record.seconds,
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_in_model_inference": inference,
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
    }
    reasons = [reason for reason in record.finish_reasons if reason is not None]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    return {name: value for name, value in attributes.items() if value is not None}
