"""The engine's loop at the end of a bare socket: what is not a message, who does not read, what is too long."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import msgspec
import pytest
from msgspec.msgpack import encode
from worker_bench import Bench, deltas

from torch_pagoda.serving.engine_process.framing import MAX_FRAME
from torch_pagoda.serving.engine_process.wire import (
    EXIT_BAD_MESSAGE,
    EXIT_BROKEN,
    EXIT_DONE,
    Ask,
    Cancel,
    Delta,
    Hello,
    Refused,
    Step,
    Submit,
)

from toy_client import toy_engine
from toy_program import ToyProgram


def test_the_socket_is_closed_while_nothing_runs() -> None:
    bench = Bench(toy_engine()).start()
    assert any(isinstance(message, Hello) for message in bench.messages())
    bench.sock.shutdown(socket.SHUT_WR)
    assert bench.end() == EXIT_DONE


def test_the_socket_is_closed() -> None:
    bench = Bench(toy_engine()).start()
    bench.send(Submit("r", [[1]], {"max_tokens": 120}))
    assert any(isinstance(message, Step) for message in bench.messages())
    bench.sock.shutdown(socket.SHUT_RDWR)
    assert bench.end() == EXIT_DONE
    assert bench.engine.stats()["generated_tokens"] < 120


def test_closed_while_it_waits_for_a_reader() -> None:
    bench = Bench(toy_engine(), max_unsent=1000, stall_seconds=30).start()
    bench.send(Submit("r", [[1]], {"max_tokens": 120, "logprobs": 20}))
    while bench.worker._writer.num_unsent <= 1000:
        time.sleep(0.01)
    bench.sock.close()
    assert bench.end() == EXIT_DONE


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"garbage",
        encode({"a": 1}),
        encode(["nonsense", 1]),
        encode(["submit", 3, [[1]], {}]),
        encode(["submit", "r", [["a"]], {}]),
        encode(["submit", "r", [[1]], []]),
        encode(["submit", "r"]),
        encode(Hello(1, 1, 1, 1, None, {}, "", "", {})),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_ends_it(frame: bytes, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(toy_engine()).start()
    bench.send(Submit("r", [[1]], {"max_tokens": 120}))
    with caplog.at_level(logging.ERROR):
        bench.send_frame(frame)
        assert bench.end() == EXIT_BAD_MESSAGE
    (record,) = caplog.records
    assert "invalid message" in record.getMessage() and "\n" not in record.getMessage()


def test_a_frame_that_is_too_long_is_not_waited_for() -> None:
    bench = Bench(toy_engine()).start()
    bench.sock.sendall((MAX_FRAME + 1).to_bytes(4, "big"))
    assert bench.end() == EXIT_BAD_MESSAGE


def test_odd_parameters_are_refused_and_nothing_else_happens() -> None:
    bench = Bench(toy_engine()).start()
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    odd: list[dict[str, Any]] = [
        {"max_tokens": 10**18},
        {"stop": ["a" * 10**6]},
        {"n": -1},
        {"n": 10**6},
        {"seed": "x"},
        {"logit_bias": {1: deep}},
        {"top_p": deep},
        {"is_greedy": True},
        {"temperature": float("nan")},
        {"allowed_token_ids": [2**63]},
        {"max_tokens": b"\0"},
    ]
    for i, params in enumerate(odd):
        bench.send(Submit(str(i), [[1]], params))
        (*_, step) = bench.steps(until=str(i))
        if step.refused:
            assert isinstance(step.refused[0], Refused) and step.refused[0].code == "invalid"
        else:
            assert i == 0, params
    bench.send(Submit("\0", [[1]], {}))
    assert bench.steps("\0")[-1].refused[0].code == "invalid"
    bench.send(Cancel(["nobody", "\0"]))
    bench.send(Ask(-1, "ping"))
    assert next(m for m in bench.messages() if isinstance(m, Step) and m.answers).answers[0].call_id == -1  # type: ignore[union-attr]
    bench.sock.shutdown(socket.SHUT_WR)
    assert bench.end() == EXIT_DONE


def test_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(toy_engine(), max_unsent=20_000, stall_seconds=0.2).start()
    for i in range(8):
        bench.send(Submit(str(i), [[1]], {"max_tokens": 120, "logprobs": 50}))
    with caplog.at_level(logging.ERROR):
        assert bench.end() == EXIT_BROKEN
    assert "has not read" in caplog.text
    assert bench.worker._writer.num_unsent < 20_000 + 60_000  # one step more than may wait
    assert bench.engine.stats()["generated_tokens"] < 8 * 120


def test_a_slow_reader_is_waited_for() -> None:
    bench = Bench(toy_engine(), max_unsent=2000, stall_seconds=20).start()
    bench.send(Submit("r", [[1]], {"max_tokens": 60, "logprobs": 20}))
    found = deltas(bench.steps("r", size=3000))
    assert sum(len(delta.token_ids) for delta in found) == 60
    bench.sock.shutdown(socket.SHUT_WR)
    assert bench.end() == EXIT_DONE


def test_a_step_that_is_too_long_is_sent_in_parts() -> None:
    bench = Bench(toy_engine())
    bench.worker._writer.max_frame = 3000
    bench.start()
    bench.send(Submit("r", [[1]] * 8, {"max_tokens": 3, "logprobs": 20}))
    steps: list[Step] = []
    for message in bench.messages():
        steps += [message] if isinstance(message, Step) else []
        if sum(delta.times is not None for delta in deltas(steps)) == 8:
            break
    assert len(deltas(steps)) == 8 * 3 and all(delta.error is None for delta in deltas(steps))
    assert len([step for step in steps if step.deltas]) > 3
    bench.sock.shutdown(socket.SHUT_WR)
    assert bench.end() == EXIT_DONE


@pytest.mark.parametrize("streams", [True, False])
def test_refusals_that_are_too_long_for_a_message_all_come(streams: bool) -> None:
    bench = Bench(toy_engine())
    bench.worker._writer.max_frame = 3000
    bench.send(Submit("good", [[1]], {"max_tokens": 1, "logprobs": 20}, {}, streams))
    for i in range(60):
        bench.send(Submit(str(i), [[1]], {"temperature": -1}))
    bench.send(Ask(1, "profile"))
    bench.start()
    refused, answers, good = [], [], []
    for message in bench.messages():
        if isinstance(message, Step):
            refused += message.refused
            answers += message.answers
            good += message.deltas
            if len(refused) == 60 and answers and any(delta.times is not None for delta in good):
                break
    assert [entry.request_id for entry in refused] == [str(i) for i in range(60)]
    assert all("temperature=-1" in entry.message for entry in refused)
    bench.sock.shutdown(socket.SHUT_WR)
    assert bench.end() == EXIT_DONE


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_is_too_long_ends_its_own_request(streams: bool, max_tokens: int) -> None:
    bench = Bench(toy_engine())
    bench.worker._writer.max_frame = 3000
    bench.start()
    bench.send(Submit("other", [[1]], {"max_tokens": 60}))
    bench.send(Submit("long", [[1] * 50], {"max_tokens": max_tokens, "prompt_logprobs": 50}, {}, streams))
    steps = bench.steps("long")
    own = [delta for delta in deltas(steps) if delta.request_id == "long"]
    assert own[-1].finish_reason == "error" and "fewer log-probabilities" in (own[-1].error or "")
    assert all(delta.finish_reason is None and not delta.token_ids for delta in own[:-1])
    assert all(delta.prompt_logprobs is None for delta in own)
    others = [d for d in deltas(steps) if d.request_id == "other"]
    others += [d for d in deltas(bench.steps("other")) if d.request_id == "other"]
    assert sum(len(delta.token_ids) for delta in others) == 60 and others[-1].finish_reason == "length"
    bench.send(Ask(1, "profile"))
    assert next(m for m in bench.messages() if isinstance(m, Step) and m.answers)  # type: ignore[union-attr]
    bench.sock.shutdown(socket.SHUT_WR)
    assert bench.end() == EXIT_DONE


def test_messages_stay_as_they_are_on_the_wire() -> None:
    """A front and an engine of different versions notice; this notices that the version was forgotten."""
    delta = Delta("r", 0, 1, "text", [1, 2], finish_reason="stop")
    assert msgspec.msgpack.decode(encode(Step(1.5, [delta]))) == [
        *("step", 1.5),
        [["r", 0, 1, "text", [1, 2], None, "stop", None, None, None, 0, None]],
        *([], [], None, []),
    ]
    assert msgspec.msgpack.decode(encode(Submit("r", [[1]], {}))) == ["submit", "r", [[1]], {}, {}, True]


def test_a_lost_device_ends_the_engine_when_everybody_knows() -> None:
    program = ToyProgram(vocab_size=258)
    bench = Bench(toy_engine(program, max_num_seqs=1))

    def before_call(ids: Any) -> None:
        if len(program.steps) >= 3:
            raise RuntimeError("device lost")

    program.before_call = before_call
    bench.start()
    bench.send(Submit("r", [[1], [2]], {"max_tokens": 20}))
    last = [delta for delta in deltas(bench.steps("r")) if delta.finish_reason is not None]
    assert {delta.prompt_index for delta in last} == {0, 1}
    assert all(delta.finish_reason == "error" and "the device is lost" in (delta.error or "") for delta in last)
    assert bench.end() == EXIT_BROKEN
