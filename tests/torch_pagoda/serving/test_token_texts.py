"""Tokens of log-probabilities: their texts join to the answer, their bytes make it up, offsets are of its text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_engine import BigramProgram
from word_tokenizers import KINDS, word_tokenizer

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.engine_process.wire import TokenLogprob
from torch_pagoda.serving.generation.logprobs import TokenTexts, completion_logprobs
from torch_pagoda.serving.generation.prompt_texts import prompt_texts
from torch_pagoda.serving.settings import Settings

from described_answers import JudgingTransport
from toy_client import toy_client

pytestmark = pytest.mark.anyio

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
PROMPTS = ("The list", "naïve (b", "😀 for", " two  spaces ", "e\u0301 <|im_start|> ▁x\n\n", "a NEWTOK b <b>")


@asynccontextmanager
async def served(kind: str) -> AsyncIterator[httpx.AsyncClient]:
    """A server in this process, over random weights."""
    tokenizer = word_tokenizer(kind)
    program = BigramProgram(vocab_size=len(tokenizer), max_model_len=400)
    ends = [tokenizer.eos_token_id]
    engine = Engine(program, tokenizer, eos_token_ids=ends, block_size=16, num_blocks=512, max_num_seqs=8)  # type: ignore[arg-type]
    async with toy_client(engine) as client:
        app = make_app(Settings(chat_template=TEMPLATE), client, tokenizer)
        transport = JudgingTransport(app, httpx.ASGITransport(app, raise_app_exceptions=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield http
        app.state.front.close()


def assert_joins(text: str, logprobs: dict[str, Any]) -> None:
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert "".join(tokens) == text
    assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    for token, top, logprob in zip(tokens, logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True):
        assert logprob is None or (top[token] == logprob and len(top) in (4, 5)), "nothing is overwritten"


@pytest.mark.parametrize("kind", KINDS)
async def test_completions(kind: str) -> None:
    tokenizer = word_tokenizer(kind)
    async with served(kind) as client:
        for i, prompt in enumerate((*PROMPTS, tokenizer.encode("the naïve 😀"), [tokenizer.bos_token_id] * 2)):
            asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "logprobs": 4, "temperature": 1.5, "seed": i}
            asked["skip_special_tokens"] = i % 2 == 0
            for echo in (False, True):
                whole = (await client.post("/v1/completions", json={**asked, "echo": echo})).json()["choices"][0]
                assert_joins(whole["text"], whole["logprobs"])
                if echo and isinstance(prompt, str):
                    assert whole["text"].startswith(prompt)
                named = {**asked, "echo": echo, "return_tokens_as_token_ids": True}
                ids = (await client.post("/v1/completions", json=named)).json()["choices"][0]
                assert ids["logprobs"]["text_offset"] == whole["logprobs"]["text_offset"]
                assert all(token.startswith("token_id:") for token in ids["logprobs"]["tokens"])
                events = await client.post("/v1/completions", json={**asked, "echo": echo, "stream": True})
                pieces = [json.loads(line[6:]) for line in events.text.split("\n\n")[:-2]]
                parts = [piece["choices"][0]["logprobs"] for piece in pieces if piece["choices"][0]["logprobs"]]
                for name in ("tokens", "text_offset"):
                    assert [entry for part in parts for entry in part[name]] == whole["logprobs"][name]


@pytest.mark.parametrize("kind", KINDS)
async def test_chat(kind: str) -> None:
    async with served(kind) as client:
        for seed in range(6):
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 12, "seed": seed}
            asked |= {"logprobs": True, "top_logprobs": 3, "temperature": 1.5, "skip_special_tokens": seed % 2 == 0}
            choice = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
            text, content = choice["message"]["content"], choice["logprobs"]["content"]
            # A token that has no text in the answer has its name, and no bytes.
            assert "".join(token["token"] for token in content if token["bytes"]) == text
            # Bytes of parts of characters are the tokens' own, U+FFFD in the text.
            joined = bytes(byte for token in content for byte in token["bytes"]).decode(errors="replace")
            assert joined.replace("\ufffd", "") == text.replace("\ufffd", "")


async def test_a_space_at_the_beginning_of_tokens() -> None:
    kind = "metaspace"
    the = word_tokenizer(kind).get_vocab()["▁the"]
    asked = {"max_tokens": 3, "temperature": 0, "allowed_token_ids": [the]}
    async with served(kind) as client:
        body = {"prompt": "a list", **asked, "logprobs": 20}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        chat = {"messages": [{"role": "user", "content": "q"}], **asked, "logprobs": True}
        answer = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]
    assert choice["text"] == " the the the" == answer["message"]["content"]
    assert choice["logprobs"]["tokens"] == [" the"] * 3 and choice["logprobs"]["text_offset"] == [0, 4, 8]
    names = [name for top in choice["logprobs"]["top_logprobs"] for name in top]
    assert any(name.startswith(" ") and name != " the" for name in names) and not any("▁" in name for name in names)
    assert bytes(byte for token in answer["logprobs"]["content"] for byte in token["bytes"]) == b" the the the"


async def test_an_end_and_a_beginning_are_not_counted() -> None:
    kind = "metaspace"
    eos = word_tokenizer(kind).eos_token_id
    body = {"prompt": "a list", "echo": True, "max_tokens": 3, "logprobs": 0, "allowed_token_ids": [eos]}
    async with served(kind) as client:
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"] == "a list" == "".join(tokens) and (tokens[0], tokens[-1]) == ("", "")
    assert offsets[:2] == [0, 0] and offsets[-1] == len("a list")


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(min_size=1, max_size=20) | st.sampled_from(PROMPTS), adds=st.booleans())
@settings(max_examples=40)
def test_texts_of_prompts(kind: str, text: str, adds: bool) -> None:
    tokenizer = word_tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=adds)
    assert "".join(prompt_texts(tokenizer, ids, text)) == text
    assert "".join(prompt_texts(tokenizer, ids, None)).endswith(tokenizer.decode(ids).removeprefix(" "))


def test_texts_of_prompts_behind_a_special_token_of_the_client() -> None:
    tokenizer = word_tokenizer("byte-level")
    for text in ("<|begin|>a", "<|begin|>", "a<|endoftext|>", "<|im_start|><|im_start|> <"):
        ids = tokenizer.encode(text)
        assert prompt_texts(tokenizer, ids, text) == ["", *map(tokenizer.decode, ids[1:])]


def test_likely_tokens_of_one_text_are_told_apart() -> None:
    tokenizer = word_tokenizer("metaspace")
    ids = tokenizer.convert_tokens_to_ids(["<0xF0>", "<0xF1>", "<0x20>", "▁"])
    texts = ("\ufffd", "\ufffd", " ", " ")
    entry = [
        TokenLogprob(token, -1.0 - i, i + 1, text) for i, (token, text) in enumerate(zip(ids, texts, strict=True))
    ]
    entry[0] = TokenLogprob(ids[0], -1.0, 1, "\ufffd", "")
    (top,) = completion_logprobs([entry], 4, TokenTexts(tokenizer), 0).top_logprobs
    assert top == {"": -1.0, "bytes:\\xf1": -2.0, " ": -3.0, f"token_id:{ids[3]}": -4.0}
