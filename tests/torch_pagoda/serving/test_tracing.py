"""A finished request becomes a span of the trace that its headers name; without an endpoint nothing is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torch_pagoda.serving.engine_process.wire import RequestTimes
from torch_pagoda.serving.monitoring.request_record import PromptRecord, RequestRecord
from torch_pagoda.serving.monitoring.tracing import RequestTracer


@pytest.fixture
def traced():
    """A function of a record that returns its span."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracer = RequestTracer(exporter)

    def export(record: RequestRecord):
        exporter.clear()
        tracer.export(record)
        tracer._provider.force_flush()
        (span,) = exporter.get_finished_spans()
        return span

    yield export
    tracer.close()


def finished(**fields) -> RequestRecord:
    prompt = PromptRecord(100, 64, (5,), ("stop",), RequestTimes(0.25, 0.5, 1.5, 5, 0))
    given = {"request_id": "r-1", "endpoint": "/v1/completions", "model": "tiny", "status": 200, "arrival": 1000.5}
    return RequestRecord(**{**given, "seconds": 2.5, "prompts": (prompt,), "first_token_seconds": 0.75, **fields})


def test_the_span_of_a_request(traced):
    span = traced(finished(max_tokens=9, temperature=0.5))
    assert span.name == "llm_request" and span.kind.name == "SERVER" and span.parent is None
    assert (span.start_time, span.end_time) == (1000_500_000_000, 1003_000_000_000)
    assert dict(span.attributes) == {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "r-1",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.75,
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 2.0,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }


def test_times_of_several_prompts_are_the_longest(traced):
    times = (
        RequestTimes(0.25, 0.5, 1.5, 5, 0),
        RequestTimes(0.75, 0.125, None, 1, 0),
        RequestTimes(0.5, None, 1.0, 2, 0),
    )
    prompts = [PromptRecord(1, 0, (1,), ("stop",), entry) for entry in (*times, None)]
    attributes = traced(finished(prompts=tuple(prompts))).attributes
    assert [attributes[f"gen_ai.latency.time_in_{name}"] for name in ("queue", "model_prefill", "model_decode")] == [
        *(0.75, 0.5, 1.5)
    ]


def test_the_clients_trace_goes_on(traced):
    span = traced(finished(trace_headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "x=1"}))
    assert span.context.trace_id == int("a" * 32, 16) and span.parent.span_id == int("b" * 16, 16)


@pytest.mark.parametrize("header", ["", "00", f"00-{'0' * 32}-{'b' * 16}-01", "x" * 10_000, f"ff-{'a' * 32}-b-\n"])
def test_a_bad_header_begins_a_new_trace(traced, header):
    span = traced(finished(trace_headers={"traceparent": header}))
    assert span.parent is None and span.context.trace_id not in (0, int("a" * 32, 16))


def test_a_failure_is_marked(traced):
    span = traced(finished(prompts=(), status=503, error_code="engine_dead", first_token_seconds=None))
    assert span.status.status_code.name == "ERROR" and span.status.description == "engine_dead"
    assert traced(finished(status=429)).status.status_code.name == "UNSET"


def test_nothing_is_imported_without_an_endpoint():
    code = (
        "import sys\n"
        "from torch_pagoda.serving.monitoring import metrics, tracing\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ImportError, match=r"trace_endpoint='http://x' needs OpenTelemetry: pip install 'torch-pagoda\[otel\]'"
    ):
        RequestTracer.to_endpoint("http://x")
