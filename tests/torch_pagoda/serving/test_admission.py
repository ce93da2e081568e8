"""Requests that are let in: what of them waits, and who else they hold up."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.generation import prompts
from torch_pagoda.serving.settings import Settings

from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

URL = "/v1/completions"


async def test_a_prompt_that_the_engine_refused_waits_nowhere(serve: Any, engine: FakeEngine) -> None:
    async with serve(max_queued_tokens=1000) as client:
        engine.refusal = ("invalid", "no")
        for _ in range(4):
            assert (await client.post(URL, json={"prompt": [5] * 400, "max_tokens": 1})).status_code == 400
        engine.refusal = None
        response = await client.post(URL, json={"prompt": [5] * 400, "max_tokens": 1})
        assert response.status_code == 200, response.text
        # What the engine took counts until it says how much waits.
        assert client.front.admission._tokens_since_stats == 400


async def test_a_refusal_takes_nothing_off_what_newer_figures_say(serve: Any, engine: FakeEngine) -> None:
    async with serve(max_queued_tokens=1000) as client:
        admission = client.front.admission
        ticket = admission.enter(1, 300)
        engine.stats = {"queue_tokens": 900}
        other = admission.enter(1, 100)
        ticket.not_taken()
        assert admission._tokens_since_stats == 100
        other.close()
        ticket.close()


@pytest.mark.parametrize(("count", "inline"), [(2, True), (40, False)])
async def test_many_prompts_are_tokenized_away_from_the_event_loop(
    serve: Any, monkeypatch: pytest.MonkeyPatch, count: int, inline: bool
) -> None:
    """Each of them is short enough, all of them together are not."""
    threads: set[threading.Thread] = set()
    tokenize = prompts.tokenize

    def noted(*arguments: Any, **keywords: Any) -> Any:
        threads.add(threading.current_thread())
        return tokenize(*arguments, **keywords)

    monkeypatch.setattr(prompts, "tokenize", noted)
    async with serve() as client:
        body = {"prompt": ["def f " * 200] * count, "max_tokens": 1}
        response = await client.post(URL, json=body)
    assert response.status_code in (200, 429), response.text
    assert (threads == {threading.current_thread()}) is inline


@pytest.mark.parametrize("root_path", ["", "/behind/a/proxy"])
async def test_errors_keep_their_form_behind_a_root_path(engine: FakeEngine, tokenizer: Any, root_path: str) -> None:
    app = make_app(Settings(served_model_names=("tiny",), root_path=root_path), engine, tokenizer)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        anthropic = (await client.post(f"{root_path}/v1/messages", json={})).json()
        openai = (await client.post(f"{root_path}{URL}", json={})).json()
    app.state.front.close()
    assert anthropic["type"] == "error" and set(openai) == {"error"}
