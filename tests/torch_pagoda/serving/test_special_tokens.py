"""Special tokens in answers of a real engine: marks are read, others have no text, and their text alone stays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.formats.registry import resolve
from torch_pagoda.serving.settings import Settings

from event_streams import chat_text, events
from toy_client import toy_client
from toy_program import ToyProgram, character_tokenizer

pytestmark = pytest.mark.anyio

END, BEGIN, OPEN, CLOSE = 256, 257, 258, 259
BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "temperature": 0, "logprobs": True}


def reciting_engine() -> Engine:
    """Answers ``[THINK]hm[/THINK]a<s>`` with ``<s>`` as a token, then ``<s>b`` letter by letter, and ends."""
    tokenizer: Any = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    ids = [tokenizer(text).input_ids for text in ("x", "hm", "a", "<", "s", ">", "b")]
    script = [*ids[0], OPEN, *ids[1], CLOSE, *ids[2], BEGIN, *(token for part in ids[3:] for token in part), END]
    following = dict(pairwise(script))
    program = ToyProgram(vocab_size=260)

    def recite(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        chosen = torch.tensor([following.get(int(token), END) for token in tokens])
        return torch.nn.functional.one_hot(chosen, logits.shape[-1]).float()

    program.change_logits = recite
    return Engine(program, tokenizer, block_size=4, num_blocks=16, eos_token_ids=[END])


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        ({}, "a<s>b"),
        ({"skip_special_tokens": False}, "a<s><s>b"),
        ({"include_stop_str_in_output": True}, "a<s>b"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a<s><s>b</s>"),
        ({"stop": "<s>"}, "a"),
    ],
)
async def test_what_of_an_answer_is_text(asked: dict[str, Any], content: str) -> None:
    engine = reciting_engine()
    template = "{{ messages[0].content }}"
    formats = resolve("hermes", engine.tokenizer, template, reasoning_parser="mistral")
    settings = Settings(chat_template=template, served_model_names=("toy",))
    async with toy_client(engine) as client:
        app = make_app(settings, client, engine.tokenizer, formats=formats)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            whole = (await http.post("/v1/chat/completions", json=BODY | asked)).json()
            streamed = await http.post("/v1/chat/completions", json=BODY | asked | {"stream": True})
        app.state.front.close()
    (choice,) = whole["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", content)
    assert chat_text(events(streamed.text)) == content
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    generated = ["[THINK]", "h", "m", "[/THINK]", "a", "<s>", "<", "s", ">", "b", "</s>"]
    assert tokens == (generated[:6] if "stop" in asked else generated)
