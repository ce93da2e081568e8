"""Steps by how many tokens they compute."""

from __future__ import annotations

from torch_pagoda.runtime.engine.step_sizes import FIGURES, STEP_TOKENS, StepSizes
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_client import toy_engine
from toy_program import ToyProgram


def test_a_size_counts_for_each_bound_that_it_does_not_exceed() -> None:
    sizes = StepSizes()
    for tokens in (1, 2, 8, 9, 16384, 16385):
        sizes.count(tokens)
    expected = dict.fromkeys(STEP_TOKENS, 4) | {1: 1, 8: 3, 16384: 5}
    assert sizes.stats() == {FIGURES[bound]: count for bound, count in expected.items()}


def test_an_engine_counts_its_steps() -> None:
    program, sizes = ToyProgram(vocab_size=258), list[int]()
    program.before_call = lambda tokens: sizes.append(len(tokens))
    engine = toy_engine(program)
    for _ in range(3):
        engine.submit([1] * 9, SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_unfinished():
        engine.step_pieces()
    stats = engine.stats()
    assert stats["steps"] == len(sizes) and stats["computed_tokens"] == sum(sizes)
    assert {max(sizes) > 8, min(sizes) < 8} == {True}
    for bound in STEP_TOKENS:
        assert stats[FIGURES[bound]] == sum(size <= bound for size in sizes)
