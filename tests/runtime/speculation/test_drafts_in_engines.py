"""Drafts beside what else an engine does: limits, figures, ends, failures."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
from drafters import Oracle, Raising, always, draft
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.batching import StaticBatches
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.step_metadata import StepMetadata

from toy_program import ToyProgram

PROMPT = [5, 6, 7]


def make_engine(program: Any = None, **options: Any) -> Engine:
    program = ToyProgram(dtype=torch.float64) if program is None else program
    return Engine(program, **{"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, **options})


def oracle_of(program: Any, prompt: list[int], count: int, right: float = 1.0) -> Oracle:
    return Oracle({(tuple(prompt), None): program.dense_greedy(prompt, count + 8)}, right, program.vocab_size)


def greedy(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("count", [2, 9, 17, 24])
def test_right_drafts_take_as_few_steps_as_can_be(length: int, count: int) -> None:
    engine, program = make_engine(), ToyProgram(dtype=torch.float64)
    draft(engine, oracle_of(program, PROMPT, count), length)
    (output,) = engine.generate([PROMPT], greedy(count))
    assert output.outputs[0].token_ids == program.dense_greedy(PROMPT, count)
    # The first token comes with the prompt. No row is computed for a token behind the last.
    assert engine.stats()["steps"] == 1 + -(-(count - 1) // (1 + length))
    assert engine.stats()["computed_tokens"] == len(PROMPT) + count - 1
    assert engine.stats()["spec_decode_num_accepted_tokens"] == engine.stats()["spec_decode_num_draft_tokens"]


def test_figures_count_drafts_by_place_and_no_filled_rows() -> None:
    engine, program = make_engine(), ToyProgram(dtype=torch.float64)
    oracle = oracle_of(program, PROMPT, 40)
    propose = oracle.propose
    oracle.propose = lambda request, most: propose(request, most)[:2]  # type: ignore[method-assign]
    draft(engine, oracle, 3)
    engine.generate([PROMPT], greedy(31))
    stats = engine.stats()
    assert (stats["spec_decode_num_drafts"], stats["spec_decode_num_draft_tokens"]) == (10, 20)
    places = [stats[f"spec_decode_num_accepted_tokens_pos_{place}"] for place in range(7)]
    assert places == [10, 10, 0, 0, 0, 0, 0] and stats["spec_decode_num_accepted_tokens"] == 20
    assert stats["draft_rows_filled"] == 9  # none behind the last token
    assert {tokens for tokens, *_ in engine.runner.program.steps[1:-1]} == {4}  # type: ignore[attr-defined]


def test_rows_of_a_step_are_few_numbers() -> None:
    """Requests without drafts are given rows so that steps of a number of sequences have few sizes."""
    prompts = [[n, n + 1, n + 2] for n in range(0, 24, 3)]
    engine, program = make_engine(max_num_seqs=8, num_blocks=256), ToyProgram(dtype=torch.float64)
    oracle = Oracle({(tuple(p), None): program.dense_greedy(p, 48) for p in prompts}, 1.0, program.vocab_size)
    turns = iter(range(10_000))
    propose = oracle.propose
    oracle.propose = (  # type: ignore[method-assign]
        lambda request, most: propose(request, most) if next(turns) % 3 else []
    )
    lengths = draft(engine, oracle, 3).lengths
    choose, judged = lengths.choose, []

    def choosing(rows, others, candidates, budget, num_fillers):
        length, picked = choose(rows, others, candidates, budget, num_fillers)
        added = sum(c.rows(length) - c.known for c in candidates)
        drafted = sum(c.num_drafts(length) > 0 for c in candidates)
        judged.append(rows + added + length * num_fillers(rows + added, drafted, length))
        return length, picked

    lengths.choose = choosing  # type: ignore[method-assign]
    outputs = engine.generate(prompts, greedy(40))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == program.dense_greedy(prompt, 40)
    sizes = [tokens for tokens, sequences, _ in engine.runner.program.steps if sequences == 8]  # type: ignore[attr-defined]
    assert judged[:8] == sizes[1:9]  # a length is chosen by the rows that a step will have
    assert set(sizes[1:9]) <= {8, 8 + 3, 8 + 6, 8 + 12, 8 + 24}  # until the first are near their ends


@pytest.mark.parametrize("with_kv", [True, False], ids=["hybrid", "state"])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_a_second_turn_computes_no_token_more(with_kv: bool, right: float) -> None:
    """Steps end where snapshots are due."""
    program = ToyStateProgram(with_kv=with_kv, max_model_len=1000)
    prompt, cached = list(range(2, 19)), []
    for drafts in (False, True):
        served = ToyStateProgram(with_kv=with_kv, max_model_len=1000)
        engine = make_engine(served, num_blocks=256, max_num_seqs=2)
        if drafts:
            draft(engine, oracle_of(program, prompt, 300, right), 7)
        answer = program.dense_greedy(prompt, 300)
        (output,) = engine.generate([prompt], greedy(300))
        assert output.outputs[0].token_ids == answer
        if drafts and right == 1:
            ends = [17, 64, 128, 192, 256, 316]  # of the prompt, at snapshots, before the last token
            assert engine.stats()["steps"] == 1 + sum(-(-(b - a) // 8) for a, b in pairwise(ends))
        turns = [[*prompt, *answer[:end], 3, 4, 5] for end in (299, 280, 256)]
        found = [engine.generate([turn], greedy(2))[0].num_cached_tokens for turn in turns]
        cached.append(found)
        assert served.mistakes == []
    assert cached[0] == cached[1] and cached[0][0] > 200


def test_no_snapshot_is_evicted_for_a_draft() -> None:
    program, prompt = ToyStateProgram(), list(range(2, 19))
    engine = make_engine(ToyStateProgram(), num_blocks=64, max_num_seqs=2)
    pool = engine.block_manager.pools[-1]
    draft(engine, oracle_of(program, prompt, 30), 3)
    for name in range(4):  # prompts leave snapshots until no slot is free
        engine.generate([[name, *([name + 20] * 70)]], greedy(2))
    assert pool.num_free <= 1  # which the next request takes
    before = pool.evictions
    engine.generate([prompt], greedy(30))
    assert pool.evictions <= before + 1  # the request's own slot
    assert engine.stats()["undrafted_blocks"] > 0


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_slots_of_drafts_are_given_back_before_snapshots_are_kept(right: float) -> None:
    """There is one slot more than the sequences need: for the drafts of one, or for the snapshot of the other."""
    program = ToyStateProgram()
    engine = make_engine(program, num_blocks=256)
    oracle = oracle_of(ToyStateProgram(), PROMPT, 30, right)
    propose = oracle.propose
    oracle.propose = (  # type: ignore[method-assign]
        lambda request, most: propose(request, most) if request.num_prompt_tokens == len(PROMPT) else []
    )
    draft(engine, oracle, 1)
    pool = engine.block_manager.pools[-1]
    pool.take(pool.num_free - 3)
    long = [n % 50 for n in range(59)]
    (first, _) = engine.generate([long, PROMPT], greedy(20))
    assert engine.stats()["spec_decode_num_drafts"] > 2 and program.mistakes == []
    (again,) = engine.generate([[*long, *first.outputs[0].token_ids, 3]], greedy(2))
    assert again.num_cached_tokens == 64


class TwoTables(ToyProgram):
    """Notes the lengths that tell which keys the rows of a step are given."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float64)
        self.restart_length = 17
        self.lengths: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        self.lengths.append(step.token_lengths.tolist())
        return super().__call__(input_ids, position_ids, step)


def test_keys_switch_where_the_sequence_outgrows_them() -> None:
    plain = make_engine(TwoTables()).generate([PROMPT], greedy(30))
    program = TwoTables()
    engine = make_engine(program)
    draft(engine, oracle_of(program, PROMPT, 30), 7)
    found = engine.generate([PROMPT], greedy(30))
    assert found[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert engine.stats()["steps"] < 12
    assert all(max(each) <= 17 or min(each) > 17 for each in program.lengths), "keys of both kinds in one step"


def test_beams_have_none() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    expected = make_engine().beam_search([PROMPT], params)
    engine = make_engine()
    draft(engine, oracle_of(ToyProgram(dtype=torch.float64), PROMPT, 20))
    found = engine.beam_search([PROMPT], params)
    assert [s.token_ids for s in found[0].sequences] == [s.token_ids for s in expected[0].sequences]
    assert engine.stats()["undrafted_beam_search"] and not engine.stats()["spec_decode_num_drafts"]


def test_static_batches_have_none() -> None:
    engine = make_engine(batches=StaticBatches())
    draft(engine, oracle_of(ToyProgram(dtype=torch.float64), PROMPT, 20))
    engine.generate([PROMPT], greedy(6))
    assert engine.stats()["undrafted_static_batches"] == 5 and not engine.stats()["spec_decode_num_drafts"]


def test_a_drafter_that_fails_is_counted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, program = make_engine(), ToyProgram(dtype=torch.float64)
    draft(engine, Raising({}, 0, 97))
    with caplog.at_level(logging.WARNING):
        (output,) = engine.generate([PROMPT], greedy(12))
    assert output.outputs[0].token_ids == program.dense_greedy(PROMPT, 12)
    assert engine.stats()["drafters_failed"] > 10
    assert len([r for r in caplog.records if "drafter raising fails" in r.getMessage()]) == 1


@pytest.mark.parametrize("place", [1, 3, 6])
@pytest.mark.parametrize("make", [lambda: ToyProgram(dtype=torch.float64), ToyStateProgram], ids=["dense", "hybrid"])
def test_a_step_that_fails_or_is_interrupted_loses_nothing(make: Any, place: int) -> None:
    for failure in (RuntimeError("once"), KeyboardInterrupt()):
        engine, program = make_engine(make()), make()
        prompts = [PROMPT, [8, 9]]
        answers = {(tuple(p), None): program.dense_greedy(p, 40) for p in prompts}
        draft(engine, Oracle(answers, 0.8, program.vocab_size), 3)
        calls = iter(range(1000))

        def fail(tokens: Any, calls: Any = calls, failure: BaseException = failure) -> None:
            if next(calls) == place:
                raise failure

        engine.runner.program.before_call = fail  # type: ignore[attr-defined]
        for number, prompt in enumerate(prompts):
            engine.submit(prompt, greedy(30), request_id=str(number))
        done: dict[str, list[int]] = {}
        while engine.has_unfinished():
            try:
                done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
            except KeyboardInterrupt:
                continue
        assert [done[str(n)] for n in range(2)] == [answers[tuple(p), None][:30] for p in prompts]
        engine.batcher.check()


def test_steps_are_measured_where_drafts_are_asked_for() -> None:
    engine = make_engine(speculative_config={"method": "suffix"}, max_num_seqs=2)
    state: Any = engine._core.state
    assert sorted(state.drafting.lengths.seconds.table()) == [1, 2, 4, 8, 16]
    assert not make_engine()._core.state.drafting
    hybrid = make_engine(ToyStateProgram(), speculative_config={"method": "suffix"}, max_num_seqs=1)
    assert hybrid.generate([PROMPT], greedy(20))[0].outputs[0].token_ids == ToyStateProgram().dense_greedy(PROMPT, 20)


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_repeated_requests(method: str) -> None:
    engine = make_engine(speculative_config={"method": method}, enable_prefix_caching=False)
    state: Any = engine._core.state
    always(state.drafting, 7)
    steps = []
    for _ in range(2):
        before = engine.stats()["steps"]
        (output,) = engine.generate([PROMPT], greedy(40))
        assert output.outputs[0].token_ids == ToyProgram(dtype=torch.float64).dense_greedy(PROMPT, 40)
        steps.append(engine.stats()["steps"] - before)
    if method == "suffix":
        assert steps[1] * 1.5 < steps[0]


def test_an_unknown_setting_is_refused_when_an_engine_is_made() -> None:
    with pytest.raises(ValueError, match="speculative_config: key 'model' is not one of 'suffix'"):
        make_engine(speculative_config={"method": "suffix", "model": "small"})
