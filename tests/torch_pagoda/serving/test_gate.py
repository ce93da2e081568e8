"""The gate in front of requests for text: what a refusal costs, and that places are counted exactly."""

from __future__ import annotations

import asyncio
import random
import socket
from itertools import pairwise
from typing import Any

import httpx
import pytest
import uvicorn

from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.generation.front import Front
from torch_pagoda.serving.generation.gate import GENERATION_PATHS, Turns
from torch_pagoda.serving.http.http_protocol import uvicorn_options
from torch_pagoda.serving.protocol import generation_route
from torch_pagoda.serving.settings import ApiKey, Settings

from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

URL = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
PATIENCE = 20.0


def code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


async def until(holds: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0)


async def rounds(count: int) -> None:
    """Let the event loop run so often."""
    for _ in range(count):
        await asyncio.sleep(0)


async def head_only(app: Any, path: str = URL) -> tuple[asyncio.Task[None], list[dict[str, Any]], list[str]]:
    """A request whose body never comes: its task, what was sent to it, and a line for each look at its body."""
    sent: list[dict[str, Any]] = []
    looks: list[str] = []

    async def receive() -> dict[str, Any]:
        looks.append("look")
        await asyncio.Event().wait()
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
        **{"root_path": "", "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1)},
        **{"server": ("127.0.0.1", 80), "state": {}},
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"9")],
    }
    task = asyncio.create_task(app(scope, receive, send))
    await asyncio.wait((task,), timeout=0.05)
    return task, sent, looks


async def test_a_full_server_does_not_look_at_bodies(engine: FakeEngine, tokenizer: Any) -> None:
    engine.gate = asyncio.Event()
    app = make_app(Settings(served_model_names=("tiny",), max_queue=0), engine, tokenizer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        running = [asyncio.create_task(client.post(URL, json=BODY)) for _ in range(4)]
        await until(lambda: len(engine.submits) == 4)
        for path in sorted(GENERATION_PATHS):
            task, sent, looks = await head_only(app, path)
            assert task.done() and not looks and sent[0]["status"] == 429
            headers = dict(sent[0]["headers"])
            assert headers[b"retry-after"] == b"1" and headers[b"x-request-id"]
            assert b"queue_full" in sent[1]["body"] or path == "/v1/messages"
        # What is asked beside text goes on.
        for path in ("/health", "/ready", "/v1/models", "/metrics", "/load", "/version"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        metrics = (await client.get("/metrics")).text
        engine.gate.set()
        assert [(await task).status_code for task in running] == [200] * 4
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 1.0' in metrics
    assert 'pagoda:requests_refused_total{reason="queue_full"} 4.0' in metrics
    app.state.front.close()


async def test_of_many_at_once_only_those_are_read_that_are_taken(
    serve: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.gate = asyncio.Event()
    read: list[Any] = []
    original = generation_route.read_body

    async def noted(*arguments: Any) -> Any:
        read.append(arguments)
        return await original(*arguments)

    monkeypatch.setattr(generation_route, "read_body", noted)
    async with serve(max_queue=2) as client:
        tasks = [asyncio.create_task(client.post(URL, json=BODY)) for _ in range(40)]
        await until(lambda: sum(task.done() for task in tasks) == 34)
        # They need not wait until those that are taken are made ready.
        admission = client.front.admission
        assert admission.num_completions + admission.num_places == 6 and len(read) < 6
        await until(lambda: len(engine.submits) == 6)
        engine.gate.set()
        statuses = [(await task).status_code for task in tasks]
    # In the order in which they came.
    assert statuses == [200] * 6 + [429] * 34 and len(read) == 6


async def test_a_path_with_a_newline_goes_through_the_gate(serve: Any) -> None:
    async with serve() as client:
        response = await client.post(f"{URL}%0A", json=BODY)
        assert response.status_code == 200, response.text
        assert client.front.admission.num_places == client.front.admission.num_completions == 0


async def test_who_sends_no_body_holds_no_place(engine: FakeEngine, tokenizer: Any) -> None:
    app = make_app(Settings(served_model_names=("tiny",), max_queue=0), engine, tokenizer)
    slow = [await head_only(app) for _ in range(8)]
    assert all(looks and not sent for _, sent, looks in slow)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        assert (await client.post(URL, json=BODY)).status_code == 200
    for task, _, _ in slow:
        task.cancel()
    await asyncio.wait([task for task, _, _ in slow])
    app.state.front.close()


@pytest.mark.parametrize(
    "body", [b"{", b'{"prompt": "a", "n": "x"}', b'{"prompt": "a", "model": "b"}', b'{"prompt": [[]]}']
)
async def test_what_is_refused_for_what_it_says_gives_its_place_back(serve: Any, body: bytes) -> None:
    async with serve(max_queue=0) as client:
        for _ in range(9):
            response = await client.post(URL, content=body, headers={"content-type": "application/json"})
            assert response.status_code in (400, 404)
        assert client.front.admission.num_places == 0


async def test_a_client_without_a_key_does_not_hear_that_the_server_is_full(serve: Any, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    key = {"authorization": "Bearer sk-1"}
    async with serve(max_queue=0, api_keys=(ApiKey("ann", "sk-1"),)) as client:
        running = [asyncio.create_task(client.post(URL, json=BODY, headers=key)) for _ in range(4)]
        await until(lambda: len(engine.submits) == 4)
        assert (await client.post(URL, json=BODY)).status_code == 401
        assert (await client.post(URL, json=BODY, headers=key)).status_code == 429
        anthropic = await client.post("/v1/messages", json={}, headers=key)
        assert anthropic.status_code == 429 and anthropic.json()["error"]["type"] == "rate_limit_error"
        engine.gate.set()
        await asyncio.gather(*running)


async def test_places_and_completions_never_exceed_what_there_is_room_for(serve: Any, engine: FakeEngine) -> None:
    """Requests of one to three completions, broken ones, and clients that go at any moment."""
    draw = random.Random(0)
    most = 0

    async def one(client: Any, front: Front) -> int:
        nonlocal most
        await rounds(draw.randrange(200))
        body = b"{" if draw.random() < 0.2 else None
        asked = BODY | {"n": draw.randint(1, 3), "stream": draw.random() < 0.5, "max_tokens": draw.randint(1, 9)}
        call = (
            client.post(URL, json=asked)
            if body is None
            else client.post(URL, content=body, headers={"content-type": "application/json"})
        )
        task = asyncio.create_task(call)
        if draw.random() < 0.2:
            await rounds(draw.randrange(40))
            task.cancel()
        while not task.done():
            most = max(most, front.admission.num_completions + front.admission.num_places)
            await asyncio.sleep(0)
        return 0 if task.cancelled() else int(task.result().status_code)

    async with serve(max_queue=3) as client:
        admission = client.front.admission
        statuses = await asyncio.gather(*(one(client, client.front) for _ in range(150)))
        await until(lambda: admission.num_requests == 0)
        assert admission.num_completions == admission.num_places == 0
        assert (await client.post(URL, json=BODY)).status_code == 200
    assert {200, 400, 429, 0} <= set(statuses)
    assert most == 7


async def test_a_connection_that_is_gone_is_not_kept_for_the_sake_of_a_timer() -> None:
    """Each refusal with ``connection: close`` ends one; a minute of them would be held in memory."""
    config = uvicorn.Config(lambda *_: None, **uvicorn_options(Settings()))
    config.load()
    connection = config.http_protocol_class(config, uvicorn.server.ServerState(), {}, asyncio.get_running_loop())
    near, far = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: connection, sock=near)
    far.sendall(b"no http\r\n\r\n")
    await until(transport.is_closing)
    assert b"invalid_http" in await asyncio.get_running_loop().run_in_executor(None, far.recv, 4096)
    far.close()
    await until(connection._last_timer.cancelled)


async def test_one_has_its_turn_in_each_round_of_the_loop() -> None:
    turns, rounds, seen = Turns(), 0, []

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def take(name: int) -> None:
        await turns.take()
        seen.append((name, rounds))

    counting = asyncio.create_task(count())
    tasks = [asyncio.create_task(take(i)) for i in range(8)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.wait(tasks)
    counting.cancel()
    assert [name for name, _ in seen] == [0, 1, 2, 4, 5, 6, 7]
    assert all(after > before for (_, before), (_, after) in pairwise(seen))
    before = rounds
    await turns.take()
    await turns.take()  # those before are done, so nobody waits for ever
    assert rounds >= before
