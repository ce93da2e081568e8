"""Chat templates that requests bring: as the tokenizer renders them, and ended where they do not end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from torch_pagoda.runtime.requests.conversation import render_conversation
from torch_pagoda.runtime.serving.generation.template_process import TemplateProcess
from torch_pagoda.runtime.serving.http.errors import ApiError

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hello \u2615"}]
ECHO = "{{ messages[0].content }}"
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
HOSTILE = {
    "loops": (LOOP, "is not rendered within 0.5 s"),
    "a loop in a macro that calls itself": (
        "{% macro m(n) %}{% for i in range(99999) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
        "fails: RecursionError|is not rendered within 0.5 s",
    ),
    "one long operation": ("{{ (7 ** (10 ** 9)) % 10 }}", "is not rendered within 0.5 s|takes more than 64 MiB"),
    "a long text": ("{{ 'x' * 10 ** 9 }}", "takes more than 64 MiB"),
    "a text that doubles": (
        "{% set n = namespace(t='xxxxxxxx') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "takes more than 64 MiB",
    ),
    "a long list": ("{{ ([0] * 10 ** 9) | length }}", "takes more than 64 MiB"),
    "much text": (
        "{{ messages[0].content }}{% for i in range(9000) %}0123456789{% endfor %}",
        "writes more than 40000 characters",
    ),
    "deep": (
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "fails: (RecursionError|TemplateSyntaxError|MemoryError)",
    ),
    "no template": ("{% for %}", "fails: TemplateSyntaxError"),
    "a refusal": ("{{ raise_exception('no ' ~ messages | length) }}", "fails: TemplateError: no 1"),
    "a look behind": ("{{ ''.__class__.__mro__ }}", "fails: SecurityError"),
}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(seconds=0.5, max_bytes=2**26)
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_template_without_end_is_ended_by_name(process: TemplateProcess, tokenizer: Any, name: str) -> None:
    template, words = HOSTILE[name]
    with pytest.raises(ApiError, match=words) as caught:
        await process.render(tokenizer, HELLO, template, 40_000)
    assert (caught.value.status_code, caught.value.param) == (400, "chat_template")
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    # The next one is none the worse for it.
    assert await process.render(tokenizer, HELLO, "{{ messages[0].content }}", 100) == HELLO[0]["content"]


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
async def test_a_template_is_rendered_as_the_tokenizer_does(
    process: TemplateProcess, tokenizer: Any, options: dict[str, Any]
) -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{% for m in messages %}<{{ m.role }}>{{ m.content }}<>{% endfor %}"
        "{{ tools | tojson }}{{ documents | tojson }}{{ flag }}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [*HELLO, {"role": "assistant", "content": "a", "tool_calls": None}]
    expected = render_conversation(tokenizer, messages, chat_template=template, **options)
    assert await process.render(tokenizer, messages, template, 10_000, **options) == expected


async def test_a_killed_process_leaves_others_waiting_for_no_more_than_itself(tokenizer: Any) -> None:
    process = TemplateProcess(seconds=0.3, max_bytes=2**26)
    try:
        await process.render(tokenizer, HELLO, ECHO, 10)
        child = psutil.Process(process._process._process.pid)  # type: ignore[union-attr]
        process._process.seconds = 0.3
        child.suspend()  # as an operation does that no signal interrupts
        with pytest.raises(ApiError, match="is not rendered within"):
            await process.render(tokenizer, HELLO, ECHO, 10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert await process.render(tokenizer, HELLO, ECHO, 10) == HELLO[0]["content"]
    finally:
        process.close()


async def test_too_many_wait(tokenizer: Any) -> None:
    process = TemplateProcess(seconds=0.2)
    try:
        calls = [process.render(tokenizer, HELLO, ECHO, 10) for _ in range(12)]
        results = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        process.close()
    assert results[:8] == [HELLO[0]["content"]] * 8
    assert [(r.status_code, r.code) for r in results[8:]] == [(429, "queue_full")] * 4  # type: ignore[union-attr]


async def test_a_server_goes_on_while_a_template_does(serve: Any, engine: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    async with serve(trust_request_chat_template=True) as client:
        client.front.prompts._of_requests = TemplateProcess(seconds=1.0)
        hostile = asyncio.create_task(
            client.post("/v1/chat/completions", json={**body, "chat_template": LOOP}, timeout=60)
        )
        slowest = 0.0
        while not hostile.done():
            begin = time.monotonic()
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
        response = await hostile
        own = await client.post("/v1/chat/completions", json={**body, "chat_template": "{{ messages[0].content }}"})
        counted = await client.post("/tokenize", json={"messages": HELLO, "chat_template": LOOP}, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", "chat_template")
    assert slowest < 0.8, "the others waited for the template"
    assert own.status_code == 200 and counted.json()["error"]["param"] == "chat_template"
    assert engine.submits[-1].prompts == [client.front.tokenizer("Hello \u2615", add_special_tokens=False).input_ids]
