"""Ctrl-C at any line of the runtime, in generate, stream and step."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from torch_pagoda.runtime.engine import engine as engine_module
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram, character_tokenizer

RUNTIME = Path(engine_module.__file__).parents[1]
TRACED = {
    str(RUNTIME / f"{name}.py")
    for name in (
        *("engine/engine", "engine/core", "engine/model_runner", "engine/submission", "engine/pieces"),
        *("engine/look_ahead", "engine/state", "engine/step_runner"),
        *("requests/detokenizer", "sampling/sampler"),
    )
}
PROMPTS = ["Hello", "a", "Some longer prompt"]
PARAMS = SamplingParams(temperature=0, max_tokens=5, stop=["zzzz"], logprobs=1)


def count_lines(action: Callable[[], Any], interrupt_at: int | None = None) -> int:
    """Run it and count the lines of the runtime that it executes; KeyboardInterrupt comes before line number
    ``interrupt_at``. Lines that only return a name do not count: no signal arrives between them and the line
    before."""
    count = 0

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "line" and not is_return(frame):
            if count == interrupt_at:
                raise KeyboardInterrupt
            count += 1
        return on_line

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_line if frame.f_code.co_filename in TRACED else None

    def is_return(frame: FrameType) -> bool:
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()
        return source[:1] == ["return"] and len(source) == 2 and source[1].isidentifier()

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def test_the_files_that_are_traced_are_there() -> None:
    assert all(Path(path).is_file() for path in TRACED)


def make_engine() -> tuple[ToyProgram, Engine]:
    program = ToyProgram(vocab_size=258)
    return program, Engine(
        program,
        character_tokenizer(),  # type: ignore[arg-type]
        block_size=4,
        num_blocks=11,
        max_num_seqs=3,
        max_num_batched_tokens=16,
    )


def assert_idle(engine: Engine) -> None:
    engine.batcher.check()
    assert engine.block_manager.num_used_blocks == 0
    assert not engine.has_unfinished()
    assert not engine._core.state.submissions and not engine._core.state.completions
    assert all(submission.is_finished for submission in engine._core._dropped)
    assert engine.runner._requests == [None] * 3


def expected(engine: Engine, prompts: list[str]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(prompts, PARAMS)]


@pytest.mark.parametrize("with_others", [False, True])
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_whatever_is_interrupted_is_undone(how: str, with_others: bool) -> None:
    _, engine = make_engine()
    tokens = expected(engine, PROMPTS)

    def use() -> None:
        if how == "generate":
            engine.generate(PROMPTS, PARAMS)
        else:
            list(engine.stream(PROMPTS[2], PARAMS))

    lines = count_lines(use)
    assert_idle(engine)
    runs = 24
    interrupted = 0
    # Every part of the run is hit, each time at other lines of the loop.
    for run in range(runs):
        at = run * lines // runs
        if with_others:
            name = engine.submit(PROMPTS[0], PARAMS)
            engine.step()
        try:
            count_lines(use, at)
        except KeyboardInterrupt:
            interrupted += 1
        if with_others:
            outputs = []
            while engine.has_unfinished():
                outputs += engine.step()
            assert [o.request_id for o in outputs if o.finished] == [name], at
            assert outputs[-1].outputs[0].token_ids == tokens[0], at
            assert len(outputs[-1].outputs[0].logprobs or []) == 5
        assert_idle(engine)
    assert interrupted > runs * 0.8
    assert expected(engine, PROMPTS) == tokens


def step_into(engine: Engine, finished: dict[str, Any]) -> None:
    for output in engine.step():
        if output.finished:
            assert output.request_id not in finished
            finished[output.request_id] = output


def test_an_interrupted_step_loses_nothing() -> None:
    _, engine = make_engine()
    want = [output.outputs[0] for output in engine.generate(PROMPTS, PARAMS)]
    lines = 0

    def measure() -> None:
        engine.step()

    for prompt in PROMPTS:
        engine.submit(prompt, PARAMS)
    while engine.has_unfinished():
        lines = max(lines, count_lines(measure))
    for at in range(0, lines, 61):
        names = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        finished: dict[str, Any] = {}
        step = partial(step_into, engine, finished)
        steps = 0
        while engine.has_unfinished():
            steps += 1
            if steps not in (2, 5, 8):
                step()
                continue
            with suppress(KeyboardInterrupt):
                count_lines(step, at)
        assert [finished[name].outputs[0].token_ids for name in names] == [c.token_ids for c in want], at
        assert [finished[name].outputs[0].text for name in names] == [c.text for c in want], at
        assert_idle(engine)


def test_an_interrupted_step_loses_and_repeats_no_piece() -> None:
    _, engine = make_engine()
    params = SamplingParams(temperature=0, max_tokens=5, stop=["zzzz"], logprobs=1, prompt_logprobs=0, n=2)
    want = [output.outputs for output in engine.generate(PROMPTS, params)]
    lines = 0
    for prompt in PROMPTS:
        engine.submit(prompt, params)
    while engine.has_unfinished():
        lines = max(lines, count_lines(engine.step_pieces))
    interrupted = 0
    # Most of the last lines are hit, where pieces are made and given; of the others, which ``step`` has too, some.
    for at in (*range(0, lines - 200, 151), *range(lines - 200, lines, 5)):
        names = [engine.submit(prompt, params) for prompt in PROMPTS]
        pieces: list[Any] = []

        def step(pieces: list[Any] = pieces) -> None:
            pieces += engine.step_pieces()

        steps = 0
        while engine.has_unfinished():
            steps += 1
            if steps not in (1, 3, 5, 6):
                step()
                continue
            try:
                count_lines(step, at)
            except KeyboardInterrupt:
                interrupted += 1
        for name, outputs in zip(names, want, strict=True):
            for output in outputs:
                own = [piece for piece in pieces if (piece.request_id, piece.index) == (name, output.index)]
                assert [token for piece in own for token in piece.token_ids] == output.token_ids, at
                assert "".join(piece.text for piece in own) == output.text, at
                entries = [list(entry) for piece in own for entry in piece.logprobs]
                assert entries == list(map(list, output.logprobs or [])), at
                assert [piece.finished for piece in own] == [False] * (len(own) - 1) + [True], at
                assert [piece.prompt_logprobs is not None for piece in own].count(True) == (output.index == 0), at
            assert sum(piece.metrics is not None for piece in pieces if piece.request_id == name) == 1, at
        assert_idle(engine)
    assert interrupted > 40


def test_a_second_interrupt_while_cleaning_up(monkeypatch: pytest.MonkeyPatch) -> None:
    program, engine = make_engine()
    tokens = expected(engine, PROMPTS)
    requeue_all = engine.batcher.requeue_all
    pressed = 0

    def press_again() -> Any:
        nonlocal pressed
        requeue_all()
        pressed += 1
        if pressed < 4:
            raise KeyboardInterrupt
        return requeue_all()

    monkeypatch.setattr(engine.batcher, "requeue_all", press_again)

    def interrupt(ids: Any) -> None:
        raise KeyboardInterrupt

    program.before_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    assert pressed == 4
    assert_idle(engine)
    program.before_call = None
    assert expected(engine, PROMPTS) == tokens
