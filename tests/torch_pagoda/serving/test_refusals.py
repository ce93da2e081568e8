"""Errors in OpenAI's form: keys, hosts, bodies, a full queue, an engine that is not there or fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from torch_pagoda.serving.http.auth import KeyRing
from torch_pagoda.serving.settings import ApiKey, Settings

from event_streams import events
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

URL = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 2}

KEYS = (ApiKey("ann", "sk-1"), ApiKey("bob", "sk-2"))
OPEN = ("/health", "/healthz", "/ready", "/ping", "/version", "/metrics", "/")
CLOSED = (
    *(("GET", path) for path in ("/v1/models", "/load", "/docs", "/openapi.json", "/server_info", "/nope")),
    *(("POST", path) for path in (URL, "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings")),
    *(("POST", path) for path in ("/reset_prefix_cache", "/ui/markdown")),
)


def code(response: httpx.Response) -> str:
    """The error's code; the object has OpenAI's four fields."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


@pytest.mark.parametrize("path", OPEN)
async def test_what_balancers_and_browsers_ask_needs_no_key(serve: Any, path: str) -> None:
    async with serve(api_keys=KEYS) as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_everything_else_needs_a_key(serve: Any, method: str, path: str) -> None:
    wrong: list[dict[str, Any]] = [
        {},
        {"headers": {"authorization": "Bearer sk-3"}},
        {"headers": {"authorization": "Basic sk-1"}},
        {"headers": {"authorization": "Bearer "}},
        {"headers": {"x-api-key": "sk-1x"}},
        {"params": {"api_key": "sk-1"}},
    ]
    right: list[dict[str, Any]] = [
        {"headers": {"authorization": "Bearer sk-1"}},
        {"headers": {"authorization": "bearer sk-2"}},
        {"headers": {"x-api-key": "sk-1"}},
    ]
    async with serve(api_keys=KEYS, enable_admin=True) as client:
        for how in wrong:
            response = await client.request(method, path, json=BODY, **how)
            assert response.status_code == 401 and code(response) == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for how in right:
            assert (await client.request(method, path, json=BODY, **how)).status_code != 401


async def test_metrics_can_be_protected(serve: Any) -> None:
    async with serve(api_keys=KEYS, protect_metrics=True) as client:
        assert (await client.get("/metrics")).status_code == 401


async def test_a_key_names_the_client_and_can_isolate_the_cache(serve: Any, engine: FakeEngine) -> None:
    headers = {"authorization": "Bearer sk-2"}
    async with serve(api_keys=KEYS, isolate_keys=True) as client:
        await client.post(URL, json=BODY, headers=headers)
        await client.post(URL, json=BODY | {"user": "u", "cache_salt": "s"}, headers=headers)
    first, second = (submit.options for submit in engine.submits)
    assert first == {"client": "bob", "cache_salt": "bob\0"}
    assert second == {"client": "bob\0u", "cache_salt": "bob\0s"}


def test_every_key_is_compared_whatever_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(1) or original(a, b))
    ring = KeyRing(KEYS)
    assert [ring.owner(key) for key in (b"sk-1", b"sk-2", b"", b"sk-\xff")] == ["ann", "bob", None, None]
    assert len(compared) == 8


def test_keys_are_in_no_repr() -> None:
    assert "sk-1" not in repr(Settings(api_keys=KEYS))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("127.0.0.1:8000", "localhost", "[::1]:80", "127.9.9.9", "LOCALHOST:1")),
        *((host, 400) for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil", "10.0.0.1", "")),
        ("proxy.example", 200),
    ],
)
async def test_on_the_loopback_the_host_must_be_this_machine(serve: Any, host: str, status: int) -> None:
    async with serve(allowed_hosts=("proxy.example",)) as client:
        response = await client.post(URL, json=BODY, headers={"host": host})
    assert response.status_code == status
    if status == 400:
        assert code(response) == "invalid_host"


async def test_elsewhere_any_host_is_served(serve: Any) -> None:
    async with serve(host="0.0.0.0") as client:
        assert (await client.get("/health", headers={"host": "name.example"})).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "application/problem+json"}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),
        ({"content-type": "application/x-www-form-urlencoded", "origin": "http://evil.example"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
    ],
)
async def test_bodies_are_json(serve: Any, headers: dict[str, str], status: int) -> None:
    async with serve() as client:
        response = await client.post(URL, content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/ui/markdown", URL, "/tokenize"])
async def test_a_page_of_another_origin_does_nothing(serve: Any, engine: FakeEngine, path: str) -> None:
    """Browsers send such requests without asking the server first."""
    origin = {"origin": "http://evil.example"}
    kinds = ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"})
    content = b'{"texts": ["a"], "prompt": "a", "max_tokens": 1}'
    async with serve(enable_admin=True) as client:
        for kind in kinds:
            for body in (b"", content):
                response = await client.post(path, content=body, headers=origin | kind)
                assert response.status_code == 415 and code(response) == "unsupported_media_type"
        own = await client.post(path, content=content, headers=origin | {"content-type": "application/json"})
        bare = await client.post("/reset_prefix_cache")
    assert own.status_code == bare.status_code == 200
    assert engine.asked == ["reset_prefix_cache"] * (2 if path == "/reset_prefix_cache" else 1)


async def test_other_methods_name_the_right_one(serve: Any) -> None:
    async with serve() as client:
        response = await client.get(URL)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert code(response) == "method_not_allowed"


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/audio/speech", "/v1/images/generations", "/rerank", "/score"]
)
async def test_what_is_not_served_says_why(serve: Any, path: str) -> None:
    async with serve() as client:
        response = await client.post(path, json={})
        unknown = await client.get("/v2/nothing")
    assert response.status_code == 404 and code(response) == "not_supported"
    assert unknown.status_code == 404 and code(unknown) == "not_found"


async def test_a_large_body_is_refused_before_it_is_read(serve: Any) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1000
            yield b" " * 1000

    async with serve(max_body_size=5000) as client:
        fits = await client.post(URL, content=b'{"prompt":"a","max_tokens":1}'.ljust(5000))
        announced = await client.post(URL, content=b" " * 5001)
        lying = await client.post(URL, content=chunks())
        headers = {"content-length": "9" * 30, "content-type": "application/json"}
        absurd = await client.post(URL, content=chunks(), headers=headers)
    assert fits.status_code == 200
    for response in (announced, lying, absurd):
        assert response.status_code == 413 and code(response) == "body_too_large"
    assert sent <= 7000


async def test_bodies_under_way_are_bounded_together(serve: Any, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    body = b'{"prompt":"a","max_tokens":1}'.ljust(1000)
    headers = {"content-type": "application/json"}
    async with serve(max_body_size=1000, max_queue=99) as client:
        tasks = [asyncio.create_task(client.post(URL, content=body, headers=headers)) for _ in range(34)]
        await asyncio.sleep(0.1)
        engine.gate.set()
        statuses = [response.status_code for response in await asyncio.gather(*tasks)]
        after = await client.post(URL, content=body, headers=headers)
    assert sorted(statuses) == [200] * 32 + [429] * 2
    assert after.status_code == 200


async def test_a_slow_body_is_given_up(serve: Any) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)
        yield b"}"

    async with serve(body_timeout=0.05) as client:
        response = await client.post(URL, content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 408 and code(response) == "body_timeout"


async def test_a_full_queue_refuses_without_a_hop(serve: Any, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    async with serve(max_queue=3) as client:  # and 4 run
        running = [asyncio.create_task(client.post(URL, json=BODY | {"n": n})) for n in (4, 2)]
        await asyncio.sleep(0.05)
        refused = await client.post(URL, json=BODY | {"n": 2})
        last = asyncio.create_task(client.post(URL, json=BODY))
        await asyncio.sleep(0.05)
        also = await client.post(URL, json=BODY | {"stream": True})
        load = (await client.get("/load")).json()
        engine.gate.set()
        answers = [*await asyncio.gather(*running), await last]
        after = await client.post(URL, json=BODY)
        metrics = (await client.get("/metrics")).text
    for response in (refused, also):
        assert response.status_code == 429 and code(response) == "queue_full"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert response.headers["content-type"] == "application/json"
    assert load["server_load"] == 3
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert after.status_code == 200
    assert len(engine.submits) == 4
    (line,) = (line for line in metrics.splitlines() if "requests_refused_total{" in line and "queue_full" in line)
    assert line.endswith(" 2.0")


async def test_too_many_waiting_tokens_refuse(serve: Any, engine: FakeEngine) -> None:
    engine.gate = asyncio.Event()
    engine.stats = {"queue_tokens": 6}
    async with serve(max_queued_tokens=10) as client:
        first = asyncio.create_task(client.post(URL, json=BODY | {"prompt": [5] * 4}))
        await asyncio.sleep(0.05)
        refused = await client.post(URL, json=BODY)
        engine.stats = {"queue_tokens": 0}  # what was sent is among these figures
        second = asyncio.create_task(client.post(URL, json=BODY | {"prompt": [5] * 50}))
        await asyncio.sleep(0.05)
        engine.gate.set()
        assert (await first).status_code == (await second).status_code == 200
    assert refused.status_code == 429 and code(refused) == "too_many_tokens_queued"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "expected"),
    [
        (("queue_full", "17 wait"), 429, "queue_full"),
        (("invalid", "min_tokens=9 is above max_tokens=2; lower it"), 400, "invalid_value"),
    ],
)
async def test_refusals_of_the_engine(
    serve: Any, engine: FakeEngine, stream: bool, refusal: Any, status: int, expected: str
) -> None:
    engine.refusal = refusal
    async with serve() as client:
        response = await client.post(URL, json=BODY | {"stream": stream})
        front = client.front
    assert response.status_code == status and code(response) == expected
    assert front.admission.num_completions == front.admission.num_requests == 0
    if status == 400:
        assert response.json()["error"]["param"] == "min_tokens"


@pytest.mark.parametrize(("state", "expected"), [("loading", "loading"), ("dead", "engine_dead")])
async def test_without_an_engine(serve: Any, engine: FakeEngine, state: Any, expected: str) -> None:
    engine.state = state
    async with serve() as client:
        for path in ("/health", "/ready", "/ping", "/v1/models"):
            response = await client.get(path)
            assert response.status_code == 503 and code(response) == expected and "retry-after" in response.headers
        for path in (URL, "/v1/chat/completions", "/tokenize"):
            assert code(await client.post(path, json=BODY)) == expected
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


async def test_a_silent_engine_is_not_healthy(serve: Any, engine: FakeEngine) -> None:
    engine.seconds_since_heard = 11
    async with serve() as client:
        assert code(await client.get("/health")) == "engine_silent"
        engine.seconds_since_heard = 9
        assert (await client.get("/health")).status_code == 200


async def test_while_draining_nothing_new_is_taken(serve: Any) -> None:
    async with serve() as client:
        client.front.begin_drain()
        response = await client.post(URL, json=BODY)
        assert response.status_code == 503 and code(response) == "draining" and "retry-after" in response.headers
        assert code(await client.get("/ready")) == "draining"
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_engine_stay_in_the_log(
    serve: Any, engine: FakeEngine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine.error = "secret of the engine"
    with caplog.at_level(logging.ERROR):
        async with serve() as client:
            response = await client.post(URL, json=BODY | {"stream": stream}, headers={"x-request-id": "id-7"})
    assert "secret" not in response.text and "id-7" in response.text
    assert "id-7" in caplog.text and "secret" in caplog.text
    if stream:
        assert response.status_code == 200
        assert events(response.text)[-1]["error"]["code"] == "internal_error"
    else:
        assert response.status_code == 500 and code(response) == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies(serve: Any, engine: FakeEngine, stream: bool) -> None:
    engine.gate = asyncio.Event()
    async with serve() as client:
        task = asyncio.create_task(client.post(URL, json=BODY | {"stream": stream}))
        await asyncio.sleep(0.05)
        engine.died.set()
        response = await task
    assert response.status_code == 503 and code(response) == "engine_dead"


async def test_a_bug_is_a_500_without_its_text(
    serve: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(engine, "submit", fail)
    async with serve() as client:
        with caplog.at_level(logging.INFO):
            first = await client.post(URL, json=BODY)
        assert "status=500" in caplog.text
        monkeypatch.setattr(client.front.prompts, "of_field", fail)
        second = await client.post(URL, json=BODY)
    for response in (first, second):
        assert response.status_code == 500 and code(response) == "internal_error" and "secret" not in response.text
    assert client.front.admission.num_requests == 0


@pytest.mark.parametrize(("tokens", "status"), [(0, 504), (2, 200)])
async def test_a_deadline(serve: Any, engine: FakeEngine, tokens: int, status: int) -> None:
    engine.finish, engine.finish_after = "timeout", tokens
    async with serve(request_timeout=5) as client:
        response = await client.post(URL, json=BODY | {"timeout": 9, "max_tokens": 9})
        await client.post(URL, json=BODY | {"timeout": 2})
    assert [submit.options["deadline"] for submit in engine.submits] == [5, 2]
    assert response.status_code == status
    if status == 200:
        (choice,) = response.json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "timeout")
    else:
        assert code(response) == "deadline_exceeded"


async def test_request_ids_are_taken_over_if_they_are_harmless(serve: Any) -> None:
    async with serve() as client:
        given = await client.post(URL, json=BODY, headers={"x-request-id": "abc-1"})
        bad = await client.post(URL, json=BODY, headers={"x-request-id": "a b" * 99})
        of_body = await client.post(URL, json=BODY | {"request_id": "mine"})
    assert given.headers["x-request-id"] == "abc-1"
    assert len(bad.headers["x-request-id"]) == 32
    assert of_body.headers["x-request-id"] == "mine"


async def test_cors_is_off_and_can_be_allowed(serve: Any) -> None:
    preflight = {
        "origin": "http://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    origin = {"origin": "http://page.example"}
    async with serve(api_keys=KEYS) as client:
        assert "access-control-allow-origin" not in (await client.post(URL, json=BODY, headers=origin)).headers
        assert (await client.options(URL, headers=preflight)).status_code in (401, 405)
    async with serve(api_keys=KEYS, allowed_origins=("http://page.example",)) as client:
        assert (await client.options(URL, headers=preflight)).status_code == 200
        refused = await client.post(URL, json=BODY, headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page.example"


async def test_admin_routes_are_there_where_they_are_enabled(serve: Any, engine: FakeEngine) -> None:
    engine.model = "hello"
    async with serve() as client:
        assert (await client.get("/server_info")).status_code == 404
        assert (await client.post("/reset_prefix_cache")).status_code == 404
    async with serve(enable_admin=True, api_keys=KEYS) as client:
        headers = {"x-api-key": "sk-1"}
        info = await client.get("/server_info", headers=headers)
        assert (await client.post("/reset_prefix_cache", headers=headers)).status_code == 200
    assert engine.asked == ["reset_prefix_cache"]
    assert info.json()["settings"]["api_keys"] == ["ann", "bob"] and "sk-1" not in info.text
    found = info.json()["engine"]
    assert (found["max_model_len"], found["model"], found["device"], found["stats"]) == (512, "hello", "cpu", {})


async def test_the_documents_ask_nobody_else(serve: Any) -> None:
    async with serve() as client:
        page = await client.get("/docs")
        schema = (await client.get("/openapi.json")).json()
    assert page.status_code == 200 and "http://" not in page.text and "https://" not in page.text
    assert "<script" not in page.text
    assert "/v1/chat/completions" in page.text
    assert "422" not in str(schema["paths"]["/v1/completions"])
