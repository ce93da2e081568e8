"""One engine called by several threads, by hooks within its steps, and in a forked process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram, character_tokenizer

PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [60, 61], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SECONDS = 60
"""After so long a thread counts as stuck."""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [ToyProgram().dense_greedy(prompt, 12) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Threads change places after every few bytecodes, so that what is not guarded breaks at once."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def make_engine(program: ToyProgram | None = None, **options: Any) -> Engine:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return Engine(program or ToyProgram(), **{**settings, **options})


def assert_idle(engine: Engine) -> None:
    engine.batcher.check()
    assert engine.block_manager.num_used_blocks == 0
    assert not engine.has_unfinished()
    assert not engine._core.state.submissions and not engine._core.state.completions


def await_next(engine: Engine, asked: threading.Lock) -> threading.Lock:
    """Wait until one more thread stands in the queue than when ``asked`` was its end; returns the new end."""
    end = time.monotonic() + SECONDS
    while engine._core.turns._last is asked:
        assert time.monotonic() < end, "nobody asks"
        time.sleep(0)
    return engine._core.turns._last


def run_threads(*actions: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own; their results, or the first exception."""
    results: list[Any] = [None] * len(actions)
    errors: list[BaseException] = []

    def guarded(place: int) -> None:
        try:
            results[place] = actions[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads_in_generate_get_what_one_thread_gets(num_threads: int, expected: list[list[int]]) -> None:
    engine = make_engine()

    def generate(first: int) -> list[list[int]]:
        got = []
        for turn in range(3):
            order = [(first + turn + i) % len(PROMPTS) for i in range(len(PROMPTS))]
            outputs = engine.generate([PROMPTS[i] for i in order], GREEDY)
            got.append([outputs[order.index(i)].outputs[0].token_ids for i in range(len(PROMPTS))])
        return got

    results = run_threads(*[lambda first=first: generate(first) for first in range(num_threads)])
    assert results == [[expected] * 3] * num_threads
    assert_idle(engine)


def test_every_method_may_be_called_from_any_thread(expected: list[list[int]]) -> None:
    engine = make_engine()
    stop = threading.Event()
    search = BeamSearchParams(beam_width=2, max_tokens=6)
    alone = [(s.token_ids, s.score) for s in make_engine().beam_search([PROMPTS[2]], search)[0].sequences]

    def generate() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]

    def stream() -> list[int]:
        return [token for piece in engine.stream(PROMPTS[2], GREEDY) for token in piece.token_ids]

    def leave_a_stream() -> None:
        for i in range(20):
            for count, _ in enumerate(engine.stream(PROMPTS[i % len(PROMPTS)], GREEDY)):
                if count == i % 3:
                    break

    def beams() -> list[tuple[list[int], float]]:
        return [(s.token_ids, s.score) for s in engine.beam_search([PROMPTS[2]], search)[0].sequences]

    def submit_and_cancel() -> None:
        for i in range(40):
            name = engine.submit(PROMPTS[i % len(PROMPTS)], GREEDY, f"cancelled {i}")
            engine.cancel(name)

    def watch() -> None:
        while not stop.is_set():
            stats = engine.stats()
            used, cached, free = (stats[f"blocks_{kind}"] for kind in ("used", "cached", "free"))
            assert used + cached + free == stats["blocks_total"]
            engine.profile()
            engine.reset_prefix_cache()
            engine.defragment()

    def serve() -> dict[str, Any]:
        names = [engine.submit(prompt, GREEDY, f"kept {i}") for i, prompt in enumerate(PROMPTS)]
        finished: dict[str, Any] = {}
        while not stop.is_set() or engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    assert output.request_id not in finished
                    finished[output.request_id] = output
        assert len(finished) == len(names) + 40
        return {name: finished[name].outputs[0].token_ids for name in names}

    def clients() -> list[Any]:
        try:
            return run_threads(generate, stream, beams, leave_a_stream, submit_and_cancel)
        finally:
            stop.set()

    served, results, _ = run_threads(serve, clients, watch)
    assert served == {f"kept {i}": tokens for i, tokens in enumerate(expected)}
    assert results[:2] == [expected, expected[2]]
    assert [tokens for tokens, _ in results[2]] == [tokens for tokens, _ in alone]
    scores, alone_scores = ([score for _, score in found] for found in (results[2], alone))
    torch.testing.assert_close(scores, alone_scores, rtol=1e-4, atol=1e-5)
    assert_idle(engine)


class NeverWaitedFor:
    """A lock that nobody may have to wait for, since locks give no order to those who wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise AssertionError("two threads act at once, or who comes first is left to chance")

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]


def test_who_asks_waits_for_one_step_and_not_for_the_calls_of_others(scheduling: str) -> None:
    program = ToyProgram()
    engine = make_engine(program)
    engine._core.turns._acting = NeverWaitedFor()  # type: ignore[assignment]
    waited: list[int] = []
    threads: list[threading.Thread] = []

    def ask(action: Callable[[], Any], steps: int) -> None:
        action()
        waited.append(len(program.steps) - steps)

    def in_step(ids: torch.Tensor) -> None:
        if len(threads) < 12:
            name = f"late {len(threads) // 2}"
            submit, cancel = partial(engine.submit, PROMPTS[0], GREEDY, name), partial(engine.cancel, name)
            asked = engine._core.turns._last
            action = cancel if len(threads) % 2 else submit
            threads.append(threading.Thread(target=ask, args=(action, len(program.steps)), daemon=True))
            threads[-1].start()
            await_next(engine, asked)

    program.before_call = in_step
    engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    for thread in threads:
        thread.join(SECONDS)
    # One step ahead, the turn that begins with nothing under way launches two.
    assert sorted(waited) == [0] * 11 + [int(scheduling == "ahead")], "steps that began while it waited"
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["cancelled"] * 6
    assert_idle(engine)


def test_two_calls_of_generate_run_in_one_batch() -> None:
    program = ToyProgram()
    engine = make_engine(program, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=30)
    begun = threading.Barrier(2)

    def generate(prompt: list[int]) -> None:
        first = True

        def meet(progress: Any) -> None:
            nonlocal first
            if first:
                first = False
                begun.wait(SECONDS)

        engine.generate([prompt], params, on_progress=meet)

    run_threads(lambda: generate(PROMPTS[0]), lambda: generate(PROMPTS[3]))
    # At most a few steps hold one of them alone: before the other came, and after it left.
    assert sum(sequences == 2 for _, sequences, _ in program.steps) >= 25
    assert_idle(engine)


def test_ctrl_c_in_one_thread_spares_the_others(expected: list[list[int]]) -> None:
    program = ToyProgram()
    engine = make_engine(program)
    main = threading.current_thread()

    def interrupt(ids: torch.Tensor) -> None:
        if threading.current_thread() is main and len(program.steps) > 4:
            raise KeyboardInterrupt

    program.before_call = interrupt
    results: list[Any] = []
    other = threading.Thread(
        target=lambda: results.extend(engine.generate(PROMPTS, GREEDY) for _ in range(3)), daemon=True
    )
    other.start()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, GREEDY)
    other.join(SECONDS)
    assert not other.is_alive()
    assert [[output.outputs[0].token_ids for output in outputs] for outputs in results] == [expected] * 3
    program.before_call = None
    assert_idle(engine)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """What is started in the background begins with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_waiting_for_a_turn(expected: list[list[int]], heeds_ctrl_c: None) -> None:
    program = ToyProgram()
    engine = make_engine(program)
    main = threading.main_thread()
    assert threading.current_thread() is main

    begun = threading.Event()
    was_excluded: list[bool] = []

    def press(ids: torch.Tensor) -> None:
        if len(program.steps) == 3:
            asked = engine._core.turns._last
            begun.set()
            asked = await_next(engine, asked)  # the main thread's step
            time.sleep(0.05)  # until it waits in the lock: on its way there it would see the signal only behind it
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            await_next(engine, asked)  # its submit
            time.sleep(0.05)  # in which it would act, were it let in
            was_excluded.append("next" not in engine._core.state.submissions)

    results: list[Any] = []
    program.before_call = press
    other = threading.Thread(target=lambda: results.append(engine.generate(PROMPTS, GREEDY)), daemon=True)
    other.start()
    begun.wait(SECONDS)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.submit(PROMPTS[0], GREEDY, "next") == "next"
    other.join(SECONDS)
    assert was_excluded == [True]
    assert [output.outputs[0].token_ids for output in results[0]] == expected
    while engine.has_unfinished():
        last = engine.step()
    assert last[0].outputs[0].token_ids == expected[0]
    assert_idle(engine)


def test_a_stream_that_is_left_while_another_thread_steps_ends_with_that_step() -> None:
    program = ToyProgram()
    engine = make_engine(program)
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)
    name = engine.submit(PROMPTS[1], GREEDY)

    def leave(ids: torch.Tensor) -> None:
        program.before_call = None
        other = threading.Thread(target=stream.close)  # it would never end, did it wait for the step
        other.start()
        other.join(SECONDS)
        assert not other.is_alive()

    program.before_call = leave
    engine.step()
    assert engine.batcher.num_running == 1
    engine.batcher.check()
    assert engine.cancel(name)
    engine.step()
    assert_idle(engine)


def test_what_runs_within_a_step_may_not_call(expected: list[list[int]]) -> None:
    program = ToyProgram()
    engine = make_engine(program)
    refused: list[str] = []

    def call(ids: torch.Tensor) -> None:
        for action in (engine.step, engine.stats, lambda: engine.submit([1]), lambda: engine.generate([[1]])):
            with pytest.raises(RuntimeError) as error:
                action()
            refused.append(str(error.value))

    program.before_call = call
    outputs = engine.generate(PROMPTS[:1], GREEDY)
    assert outputs[0].outputs[0].token_ids == expected[0]
    assert len(refused) == 4 * 12 and {text.split(";")[0] for text in refused} == {
        "the engine is called by a hook or signal handler within one of its own steps"
    }
    assert_idle(engine)


def test_callbacks_and_open_streams_may_call(expected: list[list[int]]) -> None:
    engine = make_engine()
    nested: list[list[int]] = []

    def call(progress: Any) -> None:
        if len(nested) < 2:
            nested.append([])
            nested[-1] += engine.generate([PROMPTS[3]], GREEDY)[0].outputs[0].token_ids

    stream = engine.stream(PROMPTS[2], GREEDY)
    got = list(next(stream).token_ids)
    outputs = engine.generate(PROMPTS[:2], GREEDY, on_progress=call)
    assert [output.outputs[0].token_ids for output in outputs] == expected[:2]
    assert nested == [expected[3]] * 2
    assert got + [token for piece in stream for token in piece.token_ids] == expected[2]
    assert_idle(engine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_refused(expected: list[list[int]]) -> None:
    engine = make_engine(ToyProgram(vocab_size=258), tokenizer=character_tokenizer())
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for action in (
            lambda: engine.generate(["text"], GREEDY),
            lambda: engine.stream("text", GREEDY),
            lambda: engine.submit("text", GREEDY),
            lambda: engine.beam_search(["text"], BeamSearchParams(beam_width=2)),
            lambda: next(stream),
            engine.step,
            engine.stats,
            lambda: engine.cancel("0"),
        ):
            try:
                action()
            except RuntimeError as error:
                said.append(str(error))
            except BaseException as error:
                said.append(repr(error))
            else:
                said.append("nothing")
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read().split("\n")
    assert os.waitpid(child, 0)[1] == 0
    parent = os.getpid()
    assert len(said) == 8
    for text in said:
        assert text.startswith(
            f"the engine was created in process {parent} and cannot be used in its fork {child}"
        ), text
    assert sum(len(piece.token_ids) for piece in stream) == 11, "here it goes on"
    assert_idle(engine)
