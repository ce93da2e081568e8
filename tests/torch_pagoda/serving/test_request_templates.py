"""Chat templates that requests bring: rendered as the tokenizer renders them, and within limits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from torch_pagoda.runtime.requests.conversation import render_conversation
from torch_pagoda.serving.generation import prompts
from torch_pagoda.serving.generation.prompts import TEMPLATE_CHARACTERS, Prompts
from torch_pagoda.serving.http.errors import ApiError

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello \u2615"}]
REFUSED = {
    "too long a template": (
        "{#" + "x" * TEMPLATE_CHARACTERS + "#}",
        "chat_template",
        "is longer than 65536 characters",
    ),
    "much text": (
        "{{ messages[0].content }}{% for i in range(9000) %}0123456789{% endfor %}",
        "messages",
        "too long .90007 characters.",
    ),
    "a long loop": ("{% for i in range(10 ** 9) %}x{% endfor %}", "chat_template", "failed: OverflowError"),
    "deep": (
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "chat_template",
        "failed: (RecursionError|TemplateSyntaxError|MemoryError)",
    ),
    "no template": ("{% for %}", "chat_template", "failed: TemplateSyntaxError"),
    "a refusal": ("{{ raise_exception('no ' ~ messages | length) }}", "chat_template", "failed: TemplateError: no 1"),
    "a look behind": ("{{ ''.__class__.__mro__ }}", "chat_template", "failed: SecurityError"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_template_that_goes_too_far_is_refused_by_name(tokenizer: Any, name: str) -> None:
    template, param, words = REFUSED[name]
    made = Prompts(tokenizer)
    with pytest.raises(ApiError, match=words) as caught:
        await made.of_messages(HELLO, 4096, chat_template=template)
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    made.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {
            "documents": [{"title": "a", "text": "b"}],
            "chat_template_kwargs": {"flag": [1, None, 2.5], "bos_token": "B"},
        },
    ],
    ids=str,
)
async def test_a_template_is_rendered_as_the_tokenizer_does(tokenizer: Any, options: dict[str, Any]) -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{% for m in messages %}<{{ m.role }}>{{ m.content }}<>{% endfor %}"
        "{{ tools | tojson }}{{ documents | tojson }}{{ flag }}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [*HELLO, {"role": "assistant", "content": "a", "tool_calls": None}]
    expected = render_conversation(tokenizer, messages, chat_template=template, **options)
    made = Prompts(tokenizer)
    assert (await made.of_messages(messages, 4096, chat_template=template, **options)).text == expected
    made.close()


async def test_a_server_goes_on_while_a_template_does(
    serve: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    own, looping_text = "{{ messages[0].content }}", "{{ messages[0].content }}{# loop #}"
    begun, release, render = threading.Event(), threading.Event(), prompts.render_conversation

    def held(*args: Any, chat_template: str | None, **options: Any) -> str:
        if chat_template == looping_text:
            begun.set()
            release.wait(60)
        return render(*args, chat_template=chat_template, **options)

    monkeypatch.setattr(prompts, "render_conversation", held)
    async with serve(trust_request_chat_template=True) as client:
        looping = asyncio.create_task(
            client.post("/v1/chat/completions", json={**body, "chat_template": looping_text})
        )
        await asyncio.to_thread(begun.wait, 60)
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        long = {"messages": [{"role": "user", "content": "word " * 10_000}], "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=long)).status_code in (200, 400)
        monkeypatch.setattr(prompts, "PREPARE_SECONDS", 0.05)
        waiting = await client.post("/v1/chat/completions", json={**body, "chat_template": own})
        monkeypatch.setattr(prompts, "PREPARE_SECONDS", 60)
        assert not looping.done()
        release.set()
        assert (await looping).status_code == 200
        after = await client.post("/v1/chat/completions", json={**body, "chat_template": own})
    assert (waiting.status_code, waiting.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert after.status_code == 200
    assert engine.submits[-1].prompts == [client.front.tokenizer("Hello \u2615", add_special_tokens=False).input_ids]
