"""Grammars in the engine's loop: compiled beside it, and what is prepared before the first of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from structured_engine import structured_engine
from worker_bench import Bench, deltas

from torch_pagoda.runtime.engine import engine as engine_module
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured import vocabulary
from torch_pagoda.serving.engine_process.wire import EXIT_DONE, Cancel, Step, Submit
from torch_pagoda.serving.generation.grammars import Grammars

PATIENCE = 20.0
REGEX = {"max_tokens": 40, "structured_outputs": {"regex": "[ab]{7}"}}


class SlowCompiler:
    """``compile_grammar`` of the engine that begins when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.threads = threading.Event(), list[threading.Thread]()
        self._compile = engine_module.compile_grammar
        monkeypatch.setattr(engine_module, "compile_grammar", self)

    def __call__(self, asked: Any, known: Any) -> Any:
        if not engine_module.is_compiled(asked, known):
            self.threads.append(threading.current_thread())
            assert self.go_on.wait(PATIENCE)
        return self._compile(asked, known)


def text_of(steps: list[Step], request_id: str) -> str:
    return "".join(delta.text for delta in deltas(steps) if delta.request_id == request_id)


def test_other_requests_run_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowCompiler(monkeypatch)
    bench = Bench(structured_engine()).start()
    bench.send(Submit("held", [[1]], REGEX))
    bench.send(Submit("free", [[1]], {"max_tokens": 50, "ignore_eos": True}))
    assert sum(len(delta.token_ids) for delta in deltas(bench.steps("free"))) == 50
    slow.go_on.set()
    text = text_of(bench.steps("held"), "held")
    assert len(text) == 7 and set(text) <= {"a", "b"}
    # It is known now, so the next one goes straight to the queue.
    bench.send(Submit("again", [[1]], REGEX))
    assert len(text_of(bench.steps("again"), "again")) == 7
    assert len(slow.threads) == 1 and slow.threads[0] is not bench._thread
    bench.sock.close()
    assert bench.end() == EXIT_DONE


def test_an_idle_loop_wakes_up_for_a_grammar() -> None:
    bench = Bench(structured_engine()).start()
    for i in range(5):
        params = {"max_tokens": 40, "structured_outputs": {"regex": f"[ab]{{{i + 3}}}"}}
        bench.send(Submit(f"r{i}", [[1], [2]], params))
        assert len(text_of(bench.steps(f"r{i}"), f"r{i}")) >= i + 3
    bench.sock.close()
    assert bench.end() == EXIT_DONE


def test_what_is_cancelled_or_refused_meanwhile_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowCompiler(monkeypatch)
    bench = Bench(structured_engine()).start()
    bench.send(Submit("gone", [[1]], REGEX))
    bench.send(Submit("bad", [[1]], {"structured_outputs": {"regex": "(a"}}))
    bench.send(Cancel(["gone"]))
    (refused,) = bench.steps("gone")[-1].refused
    assert refused.request_id == "gone" and refused.code == "invalid"
    slow.go_on.set()
    (refused,) = bench.steps("bad")[-1].refused
    assert refused.request_id == "bad" and "regex" in refused.message
    assert bench.engine.stats()["steps"] == 0
    bench.sock.close()
    assert bench.end() == EXIT_DONE


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
def test_a_grammar_that_fails_is_refused_without_its_reason(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """A panic of an extension in Rust is a ``BaseException``."""

    def fails(asked: Any, known: Any) -> Any:
        raise kind("secret")

    monkeypatch.setattr(engine_module, "compile_grammar", fails)
    bench = Bench(structured_engine()).start()
    bench.send(Submit("r", [[1]], REGEX))
    (refused,) = bench.steps("r")[-1].refused
    assert (refused.request_id, refused.message) == ("r", "the engine failed to compile this grammar")
    bench.sock.close()
    assert bench.end() == EXIT_DONE


def test_the_socket_is_closed_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowCompiler(monkeypatch)
    bench = Bench(structured_engine()).start()
    bench.send(Submit("r", [[1]], REGEX))
    deadline = time.monotonic() + PATIENCE
    while not slow.threads and time.monotonic() < deadline:
        time.sleep(0.01)
    bench.sock.close()
    slow.go_on.set()
    assert bench.end() == EXIT_DONE


class Counted:
    """``Vocabulary``, and how often it was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self._kind = 0, vocabulary.Vocabulary
        monkeypatch.setattr(vocabulary, "Vocabulary", self)

    def __call__(self, *arguments: Any) -> Any:
        self.made += 1
        return self._kind(*arguments)


def test_a_prepared_engine_makes_nothing_for_its_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, engine = Counted(monkeypatch), structured_engine()
    vocabulary._known.pop(engine.tokenizer, None)
    engine.prepare_structured_outputs()
    assert counted.made == 1
    engine.submit([1], SamplingParams(**REGEX))
    engine.has_grammar(SamplingParams(**REGEX))
    assert counted.made == 1


@pytest.mark.anyio
async def test_a_prepared_server_makes_nothing_for_its_first_grammar(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    vocabulary._known.pop(tokenizer, None)
    counted, grammars = Counted(monkeypatch), Grammars(tokenizer)
    grammars.prepare()
    grammars._pool.submit(lambda: None).result(PATIENCE)
    grammars._pool.submit(lambda: None).result(PATIENCE)
    await grammars.check({"regex": "a"})
    assert counted.made == 1
    grammars.close()


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_without_llguidance_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch, has_tokenizer: bool) -> None:
    def missing() -> Any:
        raise ValueError("structured_outputs needs llguidance")

    monkeypatch.setattr(vocabulary, "load_llguidance", missing)
    engine = structured_engine()
    if not has_tokenizer:
        engine.tokenizer = None
    engine.prepare_structured_outputs()
    engine.submit([1], SamplingParams(max_tokens=2))
