"""``/v1/completions`` around a fake engine: forms of prompts and answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torch_pagoda.serving.engine_process.wire import TokenLogprob
from torch_pagoda.serving.generation import prompts
from torch_pagoda.serving.generation.generate import Piece
from torch_pagoda.serving.protocol.completions import CompletionAnswer, CompletionChunkChoice

from event_streams import completion_text, events
from fake_engine import WORDS, FakeEngine

pytestmark = pytest.mark.anyio

TEN = "".join(WORDS)


async def test_an_answer_has_openais_fields(serve: Any, engine: FakeEngine) -> None:
    async with serve(system_fingerprint="fp_1") as client:
        response = await client.post("/v1/completions", json={"prompt": "def f", "max_tokens": 10, "user": "u"})
    answer = response.json()
    assert response.status_code == 200
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert (answer["model"], answer["system_fingerprint"]) == ("tiny", "fp_1")
    assert answer["choices"] == [
        {"index": 0, "text": TEN, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 10,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    (submit,) = engine.submits
    assert submit.options == {"client": "u"} and not submit.streams
    assert submit.params == {"max_tokens": 10}


async def test_what_is_left_out_is_the_checkpoints_then_openais(serve: Any, engine: FakeEngine) -> None:
    engine.default_params = {"temperature": 0.6, "top_k": 20}
    async with serve() as client:
        await client.post("/v1/completions", json={"prompt": "a"})
        await client.post("/v1/completions", json={"prompt": "a", "temperature": 0, "top_k": None})
    assert [submit.params for submit in engine.submits] == [
        {"temperature": 0.6, "top_k": 20, "max_tokens": 16},
        {"temperature": 0, "top_k": 20, "max_tokens": 16},
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("def f", [[952, 272]]),
        ([952, 272], [[952, 272]]),
        (["def f", "def f"], [[952, 272], [952, 272]]),
        ([[952], [272, 5]], [[952], [272, 5]]),
    ],
)
async def test_forms_of_prompts(serve: Any, engine: FakeEngine, prompt: Any, expected: Any) -> None:
    async with serve() as client:
        answer = (await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "n": 2})).json()
    assert engine.submits[0].prompts == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 2 * len(expected)


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}, {"n": 3}])
async def test_streamed_is_what_is_not_streamed(serve: Any, more: dict[str, Any]) -> None:
    body = {"prompt": ["def f", "return"], "max_tokens": 12, **more}
    async with serve() as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        usage = {"stream_options": {"include_usage": True}}
        response = await client.post("/v1/completions", json=body | {"stream": True} | usage)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, last = events(response.text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    for choice in whole["choices"]:
        index = choice["index"]
        assert completion_text(chunks, index) == choice["text"]
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"] == "length"
        assert all(part["finish_reason"] is None for part in parts[:-1])
        if choice["logprobs"] is not None:
            joined = {
                name: [entry for part in parts for entry in part["logprobs"][name]] for name in choice["logprobs"]
            }
            assert joined == choice["logprobs"]


async def test_echo_with_logprobs_scores_the_prompt(serve: Any, engine: FakeEngine) -> None:
    async with serve() as client:
        body = {"prompt": "def f", "max_tokens": 1, "echo": True, "logprobs": 1}
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert engine.submits[0].params == {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}
    assert choice["text"] == "def fdef"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["def", " f", "def"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {" f": -0.5}, {"def": -0.5}]
    assert logprobs["text_offset"] == [0, 3, 5]


async def test_a_prompt_is_scored_without_a_new_token(serve: Any, engine: FakeEngine) -> None:
    async with serve() as client:
        await client.post("/v1/completions", json={"prompt": "def f", "max_tokens": 0, "echo": True, "logprobs": 1})
        refused = await client.post("/v1/completions", json={"prompt": "def f", "max_tokens": 0})
    assert engine.submits[0].params["max_tokens"] == 0
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


async def test_prompt_logprobs_and_token_ids(serve: Any) -> None:
    body = {"prompt": "def f", "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
    async with serve() as client:
        (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["prompt_token_ids"] == [952, 272] and len(choice["token_ids"]) == 2
    assert choice["prompt_logprobs"] == [None, {"272": {"logprob": -0.5, "rank": 1, "decoded_token": " f"}}]


async def test_usage_with_every_event(serve: Any) -> None:
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    async with serve() as client:
        chunks = events((await client.post("/v1/completions", json=body)).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_names_of_the_model(serve: Any) -> None:
    async with serve() as client:
        answers = [
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": name})
            for name in ("tiny", "alias", None, "other")
        ]
        listed = (await client.get("/v1/models")).json()
        one, none = await client.get("/v1/models/alias"), await client.get("/v1/models/other")
    assert [answer.json().get("model") for answer in answers] == ["tiny", "alias", "tiny", None]
    assert answers[-1].status_code == none.status_code == 404
    assert answers[-1].json()["error"]["code"] == none.json()["error"]["code"] == "model_not_found"
    assert [entry["id"] for entry in listed["data"]] == ["tiny", "alias"]
    assert one.json()["root"] == "tiny" and one.json()["max_model_len"] == 512


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1, "1", True, [])),
        *(("max_tokens", value) for value in (-1, 1.5, 10**30, "1")),
        *(("n", value) for value in (0, 65, 10**9)),
        *(("logprobs", value) for value in (-1, 21, True)),
        *(("stop", value) for value in ([""], ["x" * 257], ["x"] * 17, 5)),
        *(("logit_bias", value) for value in ({"a": 1}, {"1": 101}, {"1": "x"}, {"99999": 1}, {"-1": 1})),
        *(("seed", value) for value in (2**64, -(2**64), 1.5)),
        *(("top_p", value) for value in (-0.1, 1.1)),
        ("priority", 2**40),
        ("timeout", 0),
        ("request_id", "a b"),
        ("stream_options", {"include_usage": True}),
        ("best_of", 1025),
        ("prompt_embeds", [1]),
        ("suffix", "x"),
        ("use_beam_search", True),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    serve: Any, engine: FakeEngine, field: str, value: Any
) -> None:
    async with serve() as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1} | {field: value})
    if field == "logit_bias" and value == {"99999": 1}:
        return  # the engine knows its vocabulary
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"].startswith(field) and field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.submits


@pytest.mark.parametrize(
    "prompt", ["", [], 5, {}, [""], [[]], ["a", 5], [5, "a"], [-1], [10**9], [[1], "a"], [1.5], [True], [["a"]], None]
)
async def test_what_is_no_prompt_is_refused(serve: Any, prompt: Any) -> None:
    async with serve() as client:
        response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")


async def test_too_long_for_the_context(serve: Any, engine: FakeEngine) -> None:
    async with serve() as client:
        responses = [
            await client.post("/v1/completions", json={"prompt": [5] * count, "max_tokens": new})
            for count, new in ((512, 1), (500, 13), (500, 12), (511, None))
        ]
    assert [response.status_code for response in responses] == [400, 400, 200, 200]
    error = responses[0].json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However, ")


async def test_unknown_fields_are_named(serve: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1, "foo": 1, "bar\r\nx: y": 1, "metadata": {}, "suffix": None}
    async with serve() as client:
        response = await client.post("/v1/completions", json=body)
    assert response.headers["x-pagoda-ignored"] == "foo"
    async with serve(strict_fields=True) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["code"] == "unsupported_parameter"


async def test_prompts_are_cut_where_it_is_asked_for(serve: Any, engine: FakeEngine) -> None:
    async with serve() as client:
        for most in (2, -1):
            body = {"prompt": list(range(5, 605)), "max_tokens": 1, "truncate_prompt_tokens": most}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert [len(submit.prompts[0]) for submit in engine.submits] == [2, 511]
    assert engine.submits[0].prompts[0] == [603, 604]


async def test_truncation_keeps_the_last_tokens_of_a_text_of_any_length(
    serve: Any, engine: FakeEngine, tokenizer: Any
) -> None:
    text = " ".join(map(str, range(9000)))  # far beyond what is tokenized of a prompt that is too long
    body = {"max_tokens": 1, "truncate_prompt_tokens": 40}
    async with serve(chat_template="{{ messages[0].content }}") as client:
        for path, field in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            assert (await client.post(path, json=body | field)).status_code == 200
    expected = tokenizer(text).input_ids[-40:]
    assert [submit.prompts for submit in engine.submits] == [[expected], [expected]]


def offsets(parts: list[tuple[str, str]]) -> list[int]:
    """Offsets of tokens in the parts of one answer: new text, and the text of the new token."""
    answer = CompletionAnswer.__new__(CompletionAnswer)
    answer._count, answer._echoes, answer._offsets = 1, None, {}
    answer.texts = SimpleNamespace(text=lambda token: token.text)  # type: ignore[assignment]
    answer.asked = SimpleNamespace(return_token_ids=False)  # type: ignore[assignment]
    ask = SimpleNamespace(n=1)
    answer.generation = SimpleNamespace(ask=ask, prompt_logprobs=[None])  # type: ignore[assignment]
    found = []
    for text, token in parts:
        entries = [[TokenLogprob(5, -1.0, 1, piece)] for piece in token.split("|")]
        choice = answer._choice(CompletionChunkChoice, 0, Piece(0, text, [5], entries))
        assert choice.logprobs is not None
        found += choice.logprobs.text_offset
    return found


def test_offsets_of_tokens_are_those_of_a_whole_answer_when_text_is_held_back() -> None:
    """What may begin a stop string is held back; its tokens come all the same."""
    whole = offsets([("abcde", "ab|c|d|e")])
    assert offsets([("", "ab"), ("abc", "c"), ("", "d"), ("de", "e")]) == whole == [0, 2, 3, 4]


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 2.0},
        {"top_p": 0},
        {"best_of": 1},
        {"best_of": 1, "stream": True},
        {"best_of": 2, "n": 2, "stream": True},
        {"n": 1.0, "seed": 3.0, "stop_token_ids": [5.0]},
    ],
)
async def test_values_that_mean_a_served_one(serve: Any, asked: dict[str, Any]) -> None:
    async with serve() as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | asked)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens=2.5"),
        ({"max_tokens": 1e300}, "max_tokens", "max_tokens=1e+300"),
        ({"seed": 2.0**53}, "seed", "seed=9007199254740992.0"),
        ({"max_tokens": "2"}, "max_tokens", "max_tokens='2'"),
        ({"max_tokens": True}, "max_tokens", "max_tokens=True"),
        ({"stop": ["a", ""]}, "stop", "stop[1] has 0 characters"),
        ({"stop": ""}, "stop", "stop has 0 characters"),
        ({"stop": ["a"] * 17}, "stop", "stop has 17 texts"),
        ({"best_of": 2, "stream": True}, "best_of", "best_of=2 cannot be streamed"),
    ],
)
async def test_refusals_name_the_field_and_the_value(
    serve: Any, asked: dict[str, Any], param: str, message: str
) -> None:
    async with serve() as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2} | asked)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and message in error["message"]


async def test_what_the_engine_refuses_is_named_as_the_api_does(serve: Any, engine: FakeEngine) -> None:
    for prefix in ("sampling_params.", "sampling_params[3]."):
        engine.refusal = ("invalid", f"{prefix}logit_bias holds 999999, which is outside the vocabulary")
        async with serve() as client:
            response = await client.post("/v1/completions", json={"prompt": "a", "logit_bias": {"999999": 1}})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "logit_bias"
        assert error["message"] == "logit_bias holds 999999, which is outside the vocabulary"


async def test_an_empty_prompt_runs_where_the_tokenizer_adds_a_token(
    serve: Any, tokenizer: Any, monkeypatch: Any
) -> None:
    async with serve() as client:
        response = await client.post("/v1/completions", json={"prompt": "", "max_tokens": 1})
        assert response.status_code == 400 and "has no tokens" in response.json()["error"]["message"]
        monkeypatch.setattr(prompts, "tokenize", lambda text, *_, **__: [1, *tokenizer(text).input_ids])
        assert (await client.post("/v1/completions", json={"prompt": "", "max_tokens": 1})).status_code == 200
