"""A request's line says how it ended, and stays one line whatever the client wrote."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from torch_pagoda.serving.engine_process.wire import RequestTimes
from torch_pagoda.serving.monitoring import logs
from torch_pagoda.serving.monitoring.logs import RequestLog, formatter, log_throughput, throughput_line
from torch_pagoda.serving.monitoring.request_record import PromptRecord, RequestRecord

HOSTILE = "a\nINFO forged\r\x1b[2J\x00\x7f\x9b2J\u2028b\u202ec\ud800 status=200 \"'é"


@pytest.fixture
def written():
    """A function of format and record that returns what a request log wrote."""

    def write(log_format: str, record: RequestRecord, requests: str = "ids", **contents) -> str:
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter(log_format))
        target = logging.Logger("requests", logging.INFO)
        target.addHandler(handler)
        RequestLog(requests, target).write(record, **contents)
        return stream.getvalue()

    return write


def finished(**fields) -> RequestRecord:
    prompt = PromptRecord(100, 64, (5,), ("stop",), RequestTimes(0.25, 0.5, 1.6, 5, 0))
    given = {"request_id": "r-1", "endpoint": "/v1/completions", "model": "tiny", "status": 200, "arrival": 0.0}
    return RequestRecord(**{**given, "seconds": 2.5, "prompts": (prompt,), "first_token_seconds": 0.8, **fields})


def test_a_line_of_text(written):
    line = written("text", finished(key_name="alice", streamed=True))
    assert line.partition(" INFO ")[2] == (
        "request id=r-1 key=alice endpoint=/v1/completions model=tiny status=200 prompt_tokens=100 cached_tokens=64 "
        "output_tokens=5 finish=stop queue=0.25 ttft=0.8 tpot=0.4 seconds=2.5 streamed=yes disconnected=no\n"
    )


def test_a_line_of_json(written):
    entry = json.loads(written("json", finished(disconnected=True, status=499, error_code="client_closed")))
    assert entry.pop("time").endswith("Z")
    assert entry == {
        **{"level": "INFO", "logger": "requests", "event": "request", "id": "r-1", "key": None},
        **{"endpoint": "/v1/completions", "model": "tiny", "status": 499, "error": "client_closed"},
        **{"prompt_tokens": 100, "cached_tokens": 64, "output_tokens": 5, "finish": "stop", "queue": 0.25},
        **{"ttft": 0.8, "tpot": 0.4, "seconds": 2.5, "streamed": False, "disconnected": True},
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("field", ["request_id", "model", "key_name", "error_code"])
def test_hostile_text_stays_on_its_line(written, log_format, field):
    line = written(log_format, finished(**{field: HOSTILE}))
    assert line.endswith("\n") and line[:-1].isprintable()
    line.encode()
    if log_format == "json":
        names = {"request_id": "id", "key_name": "key", "error_code": "error"}
        assert json.loads(line)[names.get(field, field)] == HOSTILE


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_long_text_is_cut(written, log_format):
    assert len(written(log_format, finished(request_id="x" * 10_000, model="\n" * 10_000))) < 4000


def test_a_value_cannot_pass_for_another_field(written):
    line = written("text", finished(request_id="x status=500", status=200))
    assert 'id="x status=500" ' in line


def test_contents_only_where_they_are_asked_for(written):
    contents = {"prompt": "my\nsecret", "output": ["an answer"]}
    assert "secret" not in written("text", finished(), **contents)
    assert json.loads(written("json", finished(), "content", **contents))["prompt"] == "my\nsecret"
    line = written("text", finished(), "content", **contents)
    assert line.count("\n") == 1 and r"my\\nsecret" not in line and r"my\nsecret" in line
    assert written("text", finished(), "none", **contents) == ""


def test_a_traceback_has_no_line_that_looks_like_a_message():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter("text"))
    target = logging.Logger("any", logging.INFO)
    target.addHandler(handler)
    try:
        raise ValueError("bad\n2026-01-01 INFO request forged")
    except ValueError:
        target.exception("failed: %s", "x\ny")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith(r"ERROR failed: x\u000ay") and all(line.startswith("    ") for line in lines[1:])


def test_throughput_between_two_states():
    before = {"steps": 1, "prompt_tokens": 100, "generated_tokens": 10, "prefix_query_tokens": 0}
    after = {
        **{"steps": 9, "prompt_tokens": 300, "generated_tokens": 60, "running": 2, "queue_length": 1},
        **{"blocks_total": 8, "blocks_used": 2, "prefix_query_tokens": 40, "prefix_hit_tokens": 30},
    }
    assert throughput_line(before, after, 10.0) == (
        "prompts 20.0 tokens/s, generated 5.0 tokens/s, running 2, waiting 1, KV cache 25.0 %, "
        "prefix cache hits 75.0 %"
    )
    assert throughput_line(after, {**after, "running": 0, "queue_length": 0}, 10.0) is None
    assert throughput_line(after, {**after, "running": 1}, 10.0) is not None
    assert throughput_line(after, {"steps": 0}, 10.0) is None


def test_throughput_is_logged_while_busy_only(monkeypatch):
    class Client:
        states = iter([{"steps": 0}, {"steps": 5, "running": 1}, {"steps": 9}, {"steps": 9}, {"steps": 9}])

        @property
        def stats(self) -> dict[str, int]:
            return next(self.states)

    lines: list[str] = []
    monkeypatch.setattr(logs.logger, "info", lines.append)
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(log_throughput(Client(), interval=0.001))
    assert len(lines) == 2 and "running 1" in lines[0] and "running 0" in lines[1]
