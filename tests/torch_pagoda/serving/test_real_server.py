"""``pagoda serve`` as a process, asked by the openai client and over bare sockets."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from torch_pagoda import LLM, SamplingParams

from served import MODEL, PATIENCE, Served, read_all, read_until

CHATML = Path(__file__).parents[3] / "examples" / "chatml.jinja"
OPTIONS = (
    *("--chat-template", str(CHATML), "--served-model-name", "tiny", "--max-num-seqs", "4", "--max-queue", "4"),
    *("--max-model-len", "512", "--header-timeout", "1", "--body-timeout", "1"),
)
PROMPT = "Return the"
LONG = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(*OPTIONS)
    yield served
    served.kill()


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(str(MODEL), verify="off", codegen="none", max_num_seqs=4, max_model_len=512)
    yield engine
    engine.shutdown()


def test_it_says_where_it_is(server: Served) -> None:
    assert server.first_line == f"pagoda: serving tiny on {server.url}\n"
    assert server.get("/health") == {}


def test_text_is_that_of_the_offline_engine(client: OpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "def __init__(self,", "class Error(", "\u2615\U0001f600 is", "import os\n"]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, stop=["\n\n", "the "])
    # Alone, as they come to the server: in half precision a batch rounds otherwise, and a draw may be that close.
    alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
    offline = [(output.text, output.finish_reason) for output in alone]
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 3,
        "stop": ["\n\n", "the "],
    }
    for prompt, expected in zip(prompts, offline, strict=True):
        choice = client.completions.create(prompt=prompt, **asked).choices[0]
        assert (choice.text, choice.finish_reason) == expected
        chunks = list(client.completions.create(prompt=prompt, stream=True, **asked))
        assert "".join(c.choices[0].text for c in chunks) == expected[0]
        assert chunks[-1].choices[0].finish_reason == expected[1]


def test_characters_of_several_tokens_come_whole(client: OpenAI, llm: LLM) -> None:
    # A bias on the four bytes of a character makes texts of nothing else.
    wanted = "\U0001f600"
    tokens = llm.get_tokenizer()(wanted).input_ids
    assert len(tokens) == 4
    asked: dict[str, Any] = {"model": "tiny", "prompt": wanted * 4, "max_tokens": 60, "seed": 1, "temperature": 1}
    asked["logit_bias"] = {str(token): 100 for token in tokens}
    whole = client.completions.create(**asked).choices[0].text
    pieces = [c.choices[0].text for c in client.completions.create(stream=True, **asked)]
    assert "".join(pieces) == whole


def test_chat(client: OpenAI, llm: LLM) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    (offline,) = llm.chat(messages, SamplingParams(max_tokens=12, temperature=0), chat_template=CHATML.read_text())
    assert answer.choices[0].message.content == offline.outputs[0].text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(offline.prompt_token_ids)
    with client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == offline.outputs[0].text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_logprobs_are_those_of_the_offline_engine(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=2)
    (offline,) = llm.generate([PROMPT], params)
    expected = [
        entry[token].logprob
        for entry, token in zip(offline.outputs[0].logprobs or (), offline.outputs[0].token_ids, strict=True)
    ]
    choice = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2).choices[
        0
    ]
    assert choice.logprobs is not None and choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and [len(entry.top_logprobs) for entry in content] == [3, 3, 3]
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode("utf-8", "replace") is not None


def test_a_prompt_is_scored(client: OpenAI, llm: LLM) -> None:
    (offline,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0))
    scored = offline.prompt_logprobs or []
    expected = [None, *(e[t].logprob for e, t in zip(scored[1:], offline.prompt_token_ids[1:], strict=True) if e)]
    for max_tokens in (0, 1):
        choice = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
        ).choices[0]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[1:2] == pytest.approx(expected[1:], abs=1e-4)
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == len(offline.prompt_token_ids) + max_tokens
        assert choice.text.startswith(PROMPT)


def test_several_choices(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=11, n=3)
    (offline,) = llm.generate([PROMPT], params)
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, temperature=1, seed=11, n=3)
    assert [c.text for c in answer.choices] == [c.text for c in offline.outputs]
    best = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, seed=11, n=1, best_of=3)
    (offline,) = llm.generate([PROMPT], SamplingParams(max_tokens=6, temperature=1.0, seed=11, n=1, best_of=3))
    assert [c.text for c in best.choices] == [c.text for c in offline.outputs]


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=1000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="hidden states"):
        client.embeddings.create(model="tiny", input="a")


def test_headers_can_be_read(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"x-request-id": "mine-1"}, extra_body={"unheard_of": 1}
    )
    assert raw.headers["x-request-id"] == "mine-1" and raw.headers["x-pagoda-ignored"] == "unheard_of"
    assert raw.parse().choices[0].finish_reason == "length"


def test_a_full_queue_is_tried_again_by_the_client(server: Served) -> None:
    streams = [server.post("/v1/completions", LONG | {"stream": True, "n": 2}) for _ in range(4)]
    read_until(streams[0], b"data: ")
    end = time.monotonic() + PATIENCE
    while server.get("/load")["server_load"] < 4 and time.monotonic() < end:
        time.sleep(0.01)
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=PATIENCE) as once:
        with pytest.raises(openai.RateLimitError) as caught:
            once.completions.create(model="tiny", prompt="a", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=8, timeout=PATIENCE) as patient:
        for stream in streams:
            stream.close()
        assert patient.completions.create(model="tiny", prompt="a", max_tokens=1).choices
    server.becomes_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_blocks(server: Served, stream: bool) -> None:
    before = server.figure("vllm:generation_tokens_total")
    connection = server.post("/v1/completions", LONG | {"stream": stream, "n": 4})
    if stream:
        read_until(connection, b"data: ")
    else:
        end = time.monotonic() + PATIENCE
        while not server.get("/load")["running"] and time.monotonic() < end:
            time.sleep(0.01)
    connection.close()
    server.becomes_idle()
    assert server.figure("vllm:generation_tokens_total") - before < 4 * 500


def test_slow_headers_and_bodies_are_closed(server: Served) -> None:
    nothing = server.connect()
    headers = server.connect()
    headers.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")
    body = server.connect()
    body.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"prompt"'
    )
    unread = server.connect()
    unread.sendall(b"POST /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
    assert b" 408 " in read_all(nothing)
    assert b" 408 " in read_all(headers)
    assert b" 408 " in read_until(body, b"body_timeout")
    assert b" 405 " in read_all(unread)
    assert server.get("/health") == {}


def test_a_line_behind_a_body_ends_no_answer_that_is_under_way(server: Served) -> None:
    """As some clients send it; an answer may take longer than headers have time for."""
    body = json.dumps({"prompt": "def", "max_tokens": 480, "n": 8, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    sock = server.connect()
    begin = time.monotonic()
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    time.sleep(0.2)
    sock.sendall(b"\r\n")
    answer = read_until(sock, b"[DONE]")
    assert b"HTTP/1.1 408" not in answer
    if time.monotonic() - begin < 1.2:
        pytest.skip("the answer was over before the time for headers was")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b'Content-Length: 3\r\n\r\n{"prompt": "a"}',
            400,
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999\r\n\r\n",
            413,
        ),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET /%2e%2e/%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 404),
    ],
    ids=(
        *("TLS", "HTTP/9.9", "length that is none", "negative length", "chunk that is none"),
        *("short length", "huge length", "other host", "odd path"),
    ),
)
def test_what_is_no_request_gets_an_error_object(server: Served, raw: bytes, status: int) -> None:
    connection = server.connect()
    connection.sendall(raw)
    connection.shutdown(socket.SHUT_WR)
    answer = read_all(connection)
    if not answer:  # the end of what is sent is the end of the connection
        connection = server.connect()
        connection.sendall(raw)
        answer = read_until(connection, b'"code"')
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert b'{"error":{' in body
    assert server.get("/health") == {}


def test_headers_without_end_are_cut(server: Served) -> None:
    connection = server.connect()
    try:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(200):
            connection.sendall(b"X-Filler: " + b"x" * 10_000 + b"\r\n")
    except OSError:
        pass
    assert b"200 OK" not in read_all(connection)
    assert server.get("/health") == {}


def test_a_second_request_on_a_connection_is_served(server: Served) -> None:
    connection = server.connect()
    for _ in range(3):
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b'"version"' in read_until(connection, b"}")
    connection.sendall(2 * b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    read = read_until(connection, b"}")
    if read.count(b"version") < 2:
        read_until(connection, b"}")


def test_the_end_of_the_engine_is_an_event_and_another_one_starts(server: Served) -> None:
    connection = server.post("/v1/completions", LONG | {"stream": True})
    read_until(connection, b"data: ")
    before = server.figure("vllm:generation_tokens_total")
    os.kill(server.engine_pid(), signal.SIGKILL)
    rest = read_until(connection, b"[DONE]")
    event = rest.split(b"data: ")[-2].splitlines()[0]
    assert json.loads(event)["error"]["code"] == "engine_dead"
    with pytest.raises(OSError, match="503"):
        server.get("/health")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            assert server.get("/health") == {}
            break
        except OSError:
            time.sleep(0.2)
    again = read_until(server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}), b"usage")
    assert b" 200 " in again
    assert server.figure("vllm:generation_tokens_total") >= before


def test_sigterm_lets_what_is_under_way_end() -> None:
    """Last, as it ends a server of its own."""
    served = Served(*OPTIONS)
    try:
        engine = served.engine_pid()
        # So much that it is still under way when the signal has come through.
        asked = LONG | {"stream": True, "n": 2}
        streams = [served.post("/v1/completions", asked) for _ in range(3)]
        for stream in streams:
            read_until(stream, b"data: ")
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = read_until(served.post("/v1/completions", {"prompt": "a"}), b'"code"')
        texts = [read_all(stream) for stream in streams]
        status = served.process.wait(PATIENCE)
    finally:
        served.kill()
    assert b" 503 " in refused
    for text in texts:
        assert b'"finish_reason":"length","stop_reason":null' in text and b"data: [DONE]" in text
    assert status == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_sigint_cuts_streams_in_order() -> None:
    served = Served(*OPTIONS)
    try:
        stream = served.post("/v1/completions", LONG | {"stream": True})
        read_until(stream, b"data: ")
        served.process.send_signal(signal.SIGINT)
        text = read_all(stream)
        status = served.process.wait(PATIENCE)
    finally:
        served.kill()
    assert b'"stop_reason":"shutdown"' in text and b"data: [DONE]" in text
    assert status == 0
