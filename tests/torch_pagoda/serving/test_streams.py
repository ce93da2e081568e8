"""Connections that go, stall or wait: an application called as a server calls it, without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.generation import stream
from torch_pagoda.serving.settings import Settings

from event_streams import completion_text, events
from fake_engine import FakeEngine, FakeStream

pytestmark = pytest.mark.anyio

PATIENCE = 20.0


class Connection:
    """One request, its client's doings in the test's hands."""

    def __init__(
        self, app: Any, body: dict[str, Any], path: str = "/v1/completions", work_behind: float | None = None
    ) -> None:
        self.body = json.dumps(body).encode()
        self.path = path
        self.front = app.state.front
        self.sent: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.aborted = False
        self.most: int | None = None
        self.headers_take = self.body_takes = 0.0
        self._got_body = False
        self.task = asyncio.create_task(self._serve(app, work_behind))

    async def _serve(self, app: Any, work_behind: float | None) -> None:
        await app(self._scope(), self._receive, self._send)
        if work_behind is not None:
            await asyncio.sleep(work_behind)

    def _scope(self) -> dict[str, Any]:
        def abort() -> None:
            self.aborted = True

        return {
            "type": "http",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {"abort": abort},
        }

    async def _receive(self) -> dict[str, Any]:
        if not self._got_body:
            self._got_body = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if len(self.sent) == self.most:
            self.reads.clear()
        await self.reads.wait()
        await asyncio.sleep(self.headers_take if message["type"] == "http.response.start" else self.body_takes)
        self.sent.append(message)
        self.news.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    async def has_sent(self, count: int) -> None:
        """Wait for so many messages."""
        async with asyncio.timeout(PATIENCE):
            while len(self.sent) < count:
                self.news.clear()
                await self.news.wait()

    async def ends(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.task


@pytest.fixture
def connect(engine: FakeEngine, tokenizer: Any) -> Any:
    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[Any]:
        app = make_app(Settings(**settings), engine, tokenizer)
        front = app.state.front
        yield lambda body, **options: Connection(app, body, **options)
        assert not front.generations
        assert front.admission.num_requests == front.admission.num_completions == 0
        front.close()
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in tasks if "anyio" not in repr(task)], tasks

    return opened


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_ends_its_request(connect: Any, engine: FakeEngine, stream: bool) -> None:
    engine.gate = asyncio.Event()
    async with connect() as open_:
        connection = open_({"prompt": "a", "max_tokens": 5, "stream": stream})
        while not engine.submits:
            await asyncio.sleep(0)
        connection.gone.set()
        await connection.ends()
    assert engine.cancelled == [engine.submits[0].request_id]
    assert connection.sent == []


async def test_a_client_that_goes_in_mid_stream_ends_its_request(connect: Any, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    engine.gate.set()
    async with connect() as open_:
        connection = open_({"prompt": "a", "max_tokens": 500, "stream": True})
        await connection.has_sent(3)
        connection.gone.set()
        await connection.ends()
    assert len(engine.cancelled) == 1 and "[DONE]" not in connection.text


async def test_what_has_ended_is_not_cancelled(connect: Any, engine: FakeEngine) -> None:
    async with connect() as open_:
        for stream in (False, True):
            connection = open_({"prompt": "a", "max_tokens": 3, "stream": stream})
            await connection.ends()
            connection.gone.set()
            await asyncio.sleep(0)
    assert engine.cancelled == []


@pytest.mark.parametrize("streams", [False, True])
async def test_what_runs_behind_an_answer_is_not_cancelled(connect: Any, engine: FakeEngine, streams: bool) -> None:
    """Watching for a client that goes ends with the answer, and is not taken for one that has gone."""
    async with connect() as open_:
        connection = open_({"prompt": "a", "max_tokens": 3, "stream": streams}, work_behind=0.05)
        await connection.ends()
    assert engine.cancelled == []


async def test_a_reader_that_takes_nothing_is_cut(connect: Any, engine: FakeEngine) -> None:
    async with connect(stream_stall_timeout=0.2) as open_:
        connection = open_({"prompt": "a", "max_tokens": 500, "stream": True})
        await connection.has_sent(2)
        connection.reads.clear()
        await connection.ends()
    assert connection.aborted and len(engine.cancelled) == 1


async def test_a_reader_that_never_takes_the_end_is_cut(connect: Any, engine: FakeEngine) -> None:
    async with connect(stream_stall_timeout=0.2) as open_:
        connection = open_({"prompt": "a", "max_tokens": 1, "stream": True})
        connection.most = 2  # the headers and the text, but not the end
        await connection.ends()
    assert connection.aborted and len(connection.sent) == 2


async def test_a_stream_that_waits_says_so(connect: Any, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    async with connect(sse_ping=0.05) as open_:
        connection = open_({"prompt": "a", "max_tokens": 2, "stream": True})
        await connection.has_sent(4)
        assert connection.status == 200 and connection.text.count(": ping\n\n") >= 2
        engine.gate.set()
        await connection.ends()
    assert completion_text(events(connection.text)) == "def name"


@pytest.mark.parametrize("dies", [False, True])
async def test_news_do_not_overtake_the_headers_that_go_with_a_ping(
    connect: Any, engine: FakeEngine, dies: bool
) -> None:
    engine.gate = asyncio.Event()
    async with connect(sse_ping=0.05) as open_:
        connection = open_({"prompt": "a", "max_tokens": 2, "stream": True})
        connection.headers_take = 0.3
        await asyncio.sleep(0.2)
        (engine.died if dies else engine.gate).set()
        await connection.ends()
    assert [message["type"].rpartition(".")[2] for message in connection.sent[:2]] == ["start", "body"]
    assert connection.status == 200 and connection.text.startswith(": ping\n\ndata: ")
    assert connection.text.endswith("data: [DONE]\n\n") and not connection.sent[-1]["more_body"]


async def test_a_refusal_that_is_on_its_way_has_no_pings_in_it(connect: Any, engine: FakeEngine) -> None:
    engine.refusal = ("queue_full", "full")
    async with connect(sse_ping=0.05) as open_:
        connection = open_({"prompt": "a", "max_tokens": 2, "stream": True})
        connection.headers_take = 0.3
        await connection.ends()
    assert connection.status == 429 and len(connection.sent) == 2
    assert json.loads(connection.text)["error"]["code"] == "queue_full"


@pytest.fixture
def pings_before_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the engine has news, a ping's task has just been made: it gets its turn while the news are sent."""
    responses: dict[str, stream.GenerationResponse] = {}
    make, news = stream.GenerationResponse.__init__, FakeStream.next

    def making(self: stream.GenerationResponse, generation: Any, *args: Any) -> None:
        make(self, generation, *args)
        responses[generation.ask.id] = self

    async def with_ping(self: FakeStream) -> list[Any]:
        try:
            return await news(self)
        finally:
            response = responses[self._submit.request_id]
            response._last_sent = float("-inf")
            response._tick()
            assert response._ping is not None

    monkeypatch.setattr(stream.GenerationResponse, "__init__", making)
    monkeypatch.setattr(FakeStream, "next", with_ping)


async def test_a_refusal_has_no_ping_in_it_that_was_due_before_it(
    connect: Any, engine: FakeEngine, pings_before_news: None
) -> None:
    engine.refusal = ("queue_full", "full")
    async with connect() as open_:
        connection = open_({"prompt": "a", "max_tokens": 2, "stream": True})
        connection.headers_take = 0.05
        await connection.ends()
    assert connection.status == 429 and len(connection.sent) == 2
    assert json.loads(connection.text)["error"]["code"] == "queue_full"


@pytest.mark.parametrize("error", [None, "broken"])
async def test_no_ping_comes_behind_the_end(
    connect: Any, engine: FakeEngine, pings_before_news: None, error: str | None
) -> None:
    async with connect() as open_:
        connection = open_({"prompt": "a", "max_tokens": 3, "stream": True})
        connection.body_takes = 0.01
        if error:
            await connection.has_sent(2)
            engine.error = error
        await connection.ends()
        count = len(connection.sent)
        await asyncio.sleep(0.05)
    assert len(connection.sent) == count and connection.text.endswith("data: [DONE]\n\n")
    assert [message.get("more_body", True) for message in connection.sent] == [True] * (count - 1) + [False]


async def test_a_refusal_that_nobody_takes_is_cut(connect: Any, engine: FakeEngine) -> None:
    engine.refusal = ("queue_full", "full")
    async with connect(stream_stall_timeout=0.2, sse_ping=100.0) as open_:
        connection = open_({"prompt": "a", "max_tokens": 2, "stream": True})
        connection.most = 0
        await connection.ends()
    assert connection.aborted and connection.sent == []


@pytest.mark.parametrize("is_stuck", [True, False])
async def test_a_shutdown_waits_for_no_reader_that_is_stuck(
    connect: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    monkeypatch.setattr(stream, "CUT_SECONDS", 0.2)
    async with connect() as open_:
        connection = open_({"prompt": "a", "max_tokens": 400, "stream": True})
        connection.most = 3
        await connection.has_sent(3)
        front = connection.front
        front.begin_drain()
        front.cut()
        if not is_stuck:
            connection.most = None
            connection.reads.set()
        await connection.ends()
        async with asyncio.timeout(PATIENCE):
            await front.drained()
    assert connection.aborted is is_stuck and len(engine.cancelled) == 1
    assert ('"stop_reason":"shutdown"' in connection.text) is not is_stuck


async def test_a_refusal_before_any_news_has_its_own_status_and_later_it_is_an_event(
    connect: Any, engine: FakeEngine
) -> None:
    engine.gate = asyncio.Event()
    async with connect(sse_ping=0.05) as open_:
        connection = open_({"prompt": "a", "max_tokens": 2, "stream": True})
        await connection.has_sent(2)
        engine.died.set()
        await connection.ends()
        at_once = open_({"prompt": "a", "max_tokens": 2, "stream": True})
        await at_once.ends()
    assert connection.status == 200
    assert events(connection.text)[-1]["error"]["code"] == "engine_dead"
    assert at_once.status == 503 and json.loads(at_once.text)["error"]["code"] == "engine_dead"


async def test_a_cut_stream_ends_in_order(connect: Any, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    engine.gate.set()
    async with connect() as open_:
        connection = open_({"prompt": ["a", "b"], "n": 2, "max_tokens": 400, "stream": True})
        await connection.has_sent(3)
        engine.gate.clear()
        connection.front.begin_drain()
        connection.front.cut()
        await connection.ends()
    ends = [c for chunk in events(connection.text) for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(c["index"] for c in ends) == [0, 1, 2, 3]
    assert {(c["finish_reason"], c["stop_reason"]) for c in ends} == {("length", "shutdown")}
    assert len(engine.cancelled) == 1


async def test_a_cut_answer_that_is_not_streamed_is_a_503(connect: Any, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    async with connect() as open_:
        connection = open_({"prompt": "a", "max_tokens": 4})
        while not engine.submits:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        connection.front.cut()
        await connection.ends()
    assert connection.status == 503 and json.loads(connection.text)["error"]["code"] == "draining"
    assert len(engine.cancelled) == 1


async def test_text_and_events_of_several_choices_are_one_write(connect: Any, engine: FakeEngine) -> None:
    async with connect() as open_:
        connection = open_({"prompt": "a", "n": 4, "max_tokens": 3, "stream": True})
        await connection.ends()
    assert len(connection.sent) == 1 + 3 + 1  # headers, a write each step, the end


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_pieces_of_text_come_out_as_they_went_in(engine: FakeEngine, tokenizer: Any, path: str) -> None:
    engine.texts = ('"\\', "\n\r\u2028", "\x00\x1f", "😀", "", "</script>", "data: [DONE]\n\n", "é")
    text = "".join(engine.texts)
    body: dict[str, Any] = {"max_tokens": 8, "stream": True, "prompt": "a"}
    body |= {"messages": [{"role": "user", "content": "a"}]}
    template = "{{ messages[0].content }}"
    app = make_app(Settings(chat_template=template), engine, tokenizer)
    # A piece without text has no id of its own.
    original = engine.tokenizer
    engine.tokenizer = _Ids(original)
    connection = Connection(app, body, path)
    await connection.ends()
    engine.tokenizer = original
    pieces = [
        c.get("text", c.get("delta", {}).get("content")) or "" for e in events(connection.text) for c in e["choices"]
    ]
    assert "".join(pieces) == text
    app.state.front.close()


class _Ids:
    """A tokenizer that has an id for everything."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text or "a", **options)
