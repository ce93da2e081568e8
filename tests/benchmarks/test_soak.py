"""What benchmarks/soak.py would notice, and a short run of it over the toy program."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
from soak import MODEL, Oracle, Soak, growth, make_engine, slope
from soak_requests import EOS, GIVES_NAN, MAX_MODEL_LEN, RAISES, Asked, FailingProgram, reasons, wrong_with
from transformers import AutoTokenizer

from torch_pagoda import RequestOutput, SamplingParams
from torch_pagoda.runtime.program import Program
from torch_pagoda.runtime.requests.outputs import CompletionOutput, RequestMetrics

from toy_program import ToyProgram

ASKED = Asked([5, 6, 7], SamplingParams(max_tokens=3, temperature=0))


class ToyOracle:
    """Of the toy program; ``lies`` makes it find fault with everything."""

    def __init__(self, program: ToyProgram) -> None:
        self.program, self.lies, self.num_compared = program, False, 0

    def difference(self, prompt: list[int], output: list[int]) -> str | None:
        self.num_compared += 1
        logits = self.program.dense_logits(prompt + output[:-1])[len(prompt) - 1 :]
        best = logits.max(-1).values
        missing = max(float(best[i] - logits[i, token]) for i, token in enumerate(output))
        return f"{missing} below the likeliest" if missing > 1e-4 or self.lies else None


def output(**changes: Any) -> RequestOutput:
    completion = replace(CompletionOutput(0, "", [8, 9, 10], None, "length"), **changes)
    return RequestOutput("0", None, ASKED.prompt, [completion], True, RequestMetrics(0.0))


@pytest.mark.parametrize(
    ("changes", "asked", "complaint"),
    [
        ({}, ASKED, None),
        ({}, replace(ASKED, prompt=[1]), "another's prompt"),
        ({}, replace(ASKED, params=SamplingParams(n=2)), "1 completions of 2"),
        ({"token_ids": [8]}, ASKED, "1 tokens of 3"),
        ({"token_ids": [8] * 4}, ASKED, "4 tokens of 3"),
        ({"finish_reason": "stop", "token_ids": [8]}, ASKED, "for no reason"),
        ({"finish_reason": "stop", "token_ids": [8, EOS]}, ASKED, None),
        ({"finish_reason": "error", "token_ids": []}, ASKED, "ended with 'error'"),
        ({"finish_reason": "error", "token_ids": []}, replace(ASKED, fails=True), None),
        ({"finish_reason": "error", "token_ids": [RAISES]}, ASKED, None),
        ({}, replace(ASKED, fails=True), "ended with 'length'"),
        ({"finish_reason": "timeout"}, ASKED, "ended with 'timeout'"),
        ({"finish_reason": "timeout"}, replace(ASKED, has_deadline=True), None),
        ({"finish_reason": "cancelled"}, ASKED, "ended with 'cancelled'"),
        ({"finish_reason": "cancelled"}, replace(ASKED, cancelled=True), None),
    ],
)
def test_what_is_wrong_with_an_output(changes: dict[str, Any], asked: Asked, complaint: str | None) -> None:
    found = wrong_with(output(**changes), asked)
    assert found is None if complaint is None else found is not None and complaint in found


def test_a_request_may_end_where_the_model_does() -> None:
    asked = Asked([5] * (MAX_MODEL_LEN - 2), SamplingParams(max_tokens=3, temperature=0))
    assert wrong_with(replace(output(token_ids=[8, 9]), prompt_token_ids=asked.prompt), asked) is None


def test_reasons() -> None:
    assert reasons(ASKED, []) == {"stop", "length"}
    assert reasons(replace(ASKED, fails=True, cancelled=True, has_deadline=True), []) == {
        "error",
        "cancelled",
        "timeout",
    }
    assert "error" in reasons(ASKED, [5, GIVES_NAN])


def test_growth_leaves_the_beginning_out() -> None:
    assert slope([(0, 1.0), (1, 3.0), (2, 5.0)]) == pytest.approx(2)
    flat = [(1000.0 * i, 100.0 if i > 1 else 0.0) for i in range(20)]
    assert growth(flat) == pytest.approx(0)
    assert growth([(1000.0 * i, 100 + 0.3 * i) for i in range(20)]) == pytest.approx(3)
    assert growth([(1.0, 5.0)]) == 0


def toy_soak(rate: float, *, one_step_ahead: bool = False) -> tuple[Soak, FailingProgram, ToyOracle]:
    program = ToyProgram(max_model_len=MAX_MODEL_LEN, vocab_size=2048)
    failing = FailingProgram(cast(Program, program), random.Random(1), rate)
    oracle = ToyOracle(program)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    engine = make_engine(cast(Program, failing), tokenizer, one_step_ahead=one_step_ahead)
    return Soak(engine, random.Random(0), cast(Oracle, oracle), sampled=0.3), failing, oracle


@pytest.mark.parametrize("one_step_ahead", [False, True])
def test_a_short_run_finds_nothing(one_step_ahead: bool) -> None:
    soak, failing, oracle = toy_soak(0.02, one_step_ahead=one_step_ahead)
    soak.run(requests=250, minutes=None, check_every=50)
    soak.check_end(most_growth=1e9)
    assert soak.violations == []
    assert soak.num_finished == 250
    assert oracle.num_compared > 10
    assert {"raised once", "interrupted"} <= failing.counts.keys()
    assert len(soak.pool_sizes) > 1
    assert (soak.engine.stats().get("steps_ahead", 0) > 100) == one_step_ahead


def test_a_run_notices_wrong_tokens_and_lost_requests() -> None:
    soak, _, oracle = toy_soak(0.0)
    oracle.lies = True
    soak.run(requests=20, minutes=None, check_every=50)
    assert any("below the likeliest" in message for message in soak.violations)
    before = len(soak.violations)
    soak.pending["lost"] = ASKED
    soak.check_end(most_growth=1e9)
    assert any("never ended" in message for message in soak.violations[before:])
