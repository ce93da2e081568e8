"""Steps that settle 1 to k tokens a sequence give what steps of one token give, and nothing behind an end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.batching import Batcher, ScheduledRequest
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.engine.step_computer import StepComputer
from torch_pagoda.runtime.engine.step_output import SampledToken, SampleTask, StepOutput
from torch_pagoda.runtime.engine.submission import Completion
from torch_pagoda.runtime.requests.outputs import CompletionOutput, RequestOutput
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram, character_tokenizer

BYTES: Any = character_tokenizer()
PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [60, 61], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
WRONG = 96
"""What is offered behind the last token of a completion."""


class Oracle(StepComputer):
    """Puts tokens that are known to follow behind each one that is sampled.

    Attributes:
        known: request id → what the completion gave in steps of one token.
        choose: says how many a sequence is given.
        counts: tokens that were given a sequence.
    """

    known: dict[str, CompletionOutput]
    choose: Callable[[], int]
    counts: list[int]

    @classmethod
    def into(
        cls, engine: Engine, known: dict[str, CompletionOutput], choose: Callable[[], int] | None = None
    ) -> Oracle:
        steps = engine._core.steps
        oracle = cls(steps.state, steps.computer.sampler)
        draws = random.Random(0)
        oracle.known, oracle.counts, oracle.choose = known, [], choose or (lambda: draws.randint(1, 4))
        steps.computer = oracle
        return oracle

    def compute(self, scheduled: Sequence[ScheduledRequest], tasks: Sequence[SampleTask]) -> list[StepOutput]:
        outputs = super().compute(scheduled, tasks)
        return [
            StepOutput(tuple(self._more(r, own) for r, own in zip(task.requests, output.tokens, strict=True)))
            for task, output in zip(tasks, outputs, strict=True)
        ]

    def _more(self, request: Request, sampled: Sequence[SampledToken]) -> tuple[SampledToken, ...]:
        count, first = self.choose(), request.num_output_tokens
        self.counts.append(count)
        if count == 1:
            return tuple(sampled)
        known = self.known[request.request_id]
        more = []
        for place in range(first + 1, first + count):
            if place < len(known.token_ids):
                more.append(SampledToken(known.token_ids[place], known.logprobs[place] if known.logprobs else None))
            else:
                more.append(SampledToken(WRONG, {}))
        return (*sampled, *more)


def make_engine(program: ToyProgram | None = None, **options: Any) -> Engine:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **options}
    return Engine(program or ToyProgram(dtype=torch.float64), tokenizer=BYTES, **settings)


def by_request(outputs: Sequence[RequestOutput]) -> dict[str, CompletionOutput]:
    several = any(len(output.outputs) > 1 for output in outputs)
    return {
        f"{output.request_id}\0{each.index}" if several else output.request_id: each
        for output in outputs
        for each in output.outputs
    }


def add_all(engine: Engine, params: Callable[[int], SamplingParams]) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.submit(prompt, params(number), request_id=f"r{number}")


def finish(engine: Engine) -> list[RequestOutput]:
    done = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return [done[key] for key in sorted(done)]


def shown(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        [
            (each.index, each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs)
            for each in output.outputs
        ]
        for output in outputs
    ]


CASES: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda number: SamplingParams(temperature=0, max_tokens=14 + number),
    "seeded": lambda number: SamplingParams(temperature=1.0, seed=number, top_p=0.9, max_tokens=13),
    "several": lambda number: SamplingParams(temperature=1.0, seed=number, n=3, max_tokens=9),
    "penalties": lambda number: SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=11),
    "log-probabilities": lambda number: SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=10),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"num_blocks": 22, "block_size": 3, "max_num_batched_tokens": 9}], ids=str)
def test_outputs_are_those_of_single_tokens(case: str, options: dict[str, Any], scheduling: str) -> None:
    plain, several = make_engine(**options), make_engine(**options)
    add_all(plain, CASES[case])
    expected = finish(plain)
    oracle = Oracle.into(several, by_request(expected))
    add_all(several, CASES[case])
    found = finish(several)
    assert shown(found) == shown(expected)
    assert several.stats()["generated_tokens"] == plain.stats()["generated_tokens"]
    if scheduling == "synchronous" or case in ("penalties", "log-probabilities"):  # else the oracle is hardly asked
        assert set(oracle.counts) == {1, 2, 3, 4}
        assert several.stats()["steps"] < plain.stats()["steps"]
    several.batcher.check()
    assert several.block_manager.num_available_blocks == several.block_manager.num_blocks


@pytest.mark.parametrize("end", ["stop", "stop_token_ids", "max_tokens", "eos"])
def test_nothing_is_seen_behind_an_end(end: str) -> None:
    free = make_engine().generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    place = next(i for i in range(5, 12) if free.token_ids[i] not in free.token_ids[:i])
    last = free.token_ids[place]
    given: dict[str, Any] = {
        "stop": {"stop": BYTES.decode([last])},
        "stop_token_ids": {"stop_token_ids": [last]},
        "max_tokens": {"max_tokens": place + 1},
        "eos": {},
    }[end]
    params = SamplingParams(**{"temperature": 0, "max_tokens": 60, "logprobs": 0, **given})
    settings = {"eos_token_ids": [last]} if end == "eos" else {}
    (expected,) = make_engine(**settings).generate(PROMPTS[0], params)
    assert len(expected.outputs[0].token_ids) == place + 1
    for count in range(2, place + 3):
        engine = make_engine(**settings)
        oracle = Oracle.into(engine, {"r": expected.outputs[0]}, lambda count=count: count)
        engine.submit(PROMPTS[0], params, request_id="r")
        assert shown(finish(engine)) == shown([expected])
        assert set(oracle.counts) == {count}
        assert engine.stats()["generated_tokens"] == place + 1


def known_answers(engine: Engine) -> tuple[list[RequestOutput], dict[str, CompletionOutput]]:
    add_all(engine, CASES["log-probabilities"])
    expected = finish(engine)
    return expected, by_request(expected)


@pytest.mark.parametrize("place", [2, 5, 9, 14])
def test_an_interrupt_between_two_tokens_of_a_step_loses_none(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, known = known_answers(make_engine())
    engine = make_engine()
    Oracle.into(engine, known, lambda: 3)
    append, calls = Completion.append, iter(range(1000))

    def interrupted(self: Completion, token: int, logprob: Any) -> Any:
        reason = append(self, token, logprob)
        if next(calls) == place:
            raise KeyboardInterrupt
        return reason

    monkeypatch.setattr(Completion, "append", interrupted)
    add_all(engine, CASES["log-probabilities"])
    done: dict[str, RequestOutput] = {}
    interrupts = 0
    while engine.has_unfinished():
        try:
            done |= {output.request_id: output for output in engine.step() if output.finished}
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert shown([done[name] for name in sorted(done)]) == shown(expected)
    engine.batcher.check()
    assert engine.block_manager.num_available_blocks == engine.block_manager.num_blocks


def test_a_sequence_outgrows_the_short_keys_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [ToyProgram(dtype=torch.float64) for _ in range(2)]
    for program in programs:
        program.restart_length = 9
    expected, known = known_answers(make_engine(programs[0]))
    engine = make_engine(programs[1])
    Oracle.into(engine, known, lambda: 4)
    restart, restarted = Batcher.restart, []

    def noted(self: Batcher, request: Request) -> None:
        restarted.append((request.request_id, request.num_tokens))
        restart(self, request)

    monkeypatch.setattr(Batcher, "restart", noted)
    add_all(engine, CASES["log-probabilities"])
    assert shown(finish(engine)) == shown(expected)
    short = [f"r{number}" for number, prompt in enumerate(PROMPTS) if len(prompt) <= 9]
    assert sorted(restarted) == [(name, 10) for name in short] and len(short) == 3


def test_what_they_computed_is_a_prefix_for_others() -> None:
    """The blocks that such steps fill hold the keys that single tokens leave."""
    plain = make_engine()
    params = SamplingParams(temperature=0, max_tokens=21, logprobs=0)  # so that no step runs ahead of the oracle
    plain.submit(PROMPTS[2], params, request_id="r")
    (expected,) = finish(plain)
    engine = make_engine()
    oracle = Oracle.into(engine, by_request([expected]))
    engine.submit(PROMPTS[2], params, request_id="r")
    finish(engine)
    assert max(oracle.counts) > 1
    oracle.choose = lambda: 1
    turn = [*PROMPTS[2], *expected.outputs[0].token_ids, 3]
    answers = [each.generate(turn, params)[0] for each in (plain, engine)]
    assert shown([answers[0]]) == shown([answers[1]])
    assert [answer.num_cached_tokens for answer in answers] == [44, 44]
