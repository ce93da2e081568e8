"""A second program drafts for an engine."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from drafters import always
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.speculation.draft_lengths import Asking
from torch_pagoda.runtime.speculation.draft_model import DraftModel

from toy_program import ToyProgram

PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [30, 31], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"top_p": 0.9, "temperature": 1.3},
    "several": {"n": 3, "temperature": 1.0},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2, "prompt_logprobs": 1},
}
SIZES: dict[str, dict[str, Any]] = {
    "ample": {"num_blocks": 256},
    "chunks": {"num_blocks": 64, "max_num_batched_tokens": 9},
    "tight": {"num_blocks": 22, "block_size": 3, "max_num_batched_tokens": 9},
    "swapping": {"num_blocks": 22, "block_size": 3, "swap_space": 1 << 15, "preemption": "swap"},
}


class Wavering(ToyProgram):
    """Is right three times out of four."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dtype=torch.float64, **options)
        self.calls = 0

    def __call__(self, *step: Any) -> torch.Tensor:
        self.calls += 1
        logits = super().__call__(*step)
        return logits if self.calls % 4 else logits.roll(1, -1)


def toy(**options: Any) -> ToyProgram:
    return ToyProgram(dtype=torch.float64, **options)


def make_engine(program: Any = None, drafts: Any = None, most: int = 7, length: Any = None, **options: Any) -> Engine:
    """An engine with a draft model; ``length``: drafts of every step, or a function that says how many."""
    config = None if drafts is None else {"method": "draft_model", "model": "toy", "num_speculative_tokens": most}
    options = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, **options}
    engine = Engine(program or toy(), speculative_config=config, draft_program=drafts, **options)
    if length is not None:
        always(drafting_of(engine), length)
    return engine


def drafting_of(engine: Engine) -> Any:
    return engine._core.state.drafting


def drafter_of(engine: Engine) -> DraftModel:
    (drafter,) = drafting_of(engine).drafters.drafters
    assert isinstance(drafter, DraftModel)
    return drafter


def check_empty(engine: Engine) -> None:
    engine.batcher.check()
    drafter = drafter_of(engine)
    (pool,) = drafter.blocks.pools
    pool.check([0] * pool.num_blocks)
    assert not drafter.blocks.sequences
    assert not drafter._sequences and not drafter._refused


def greedy(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("windows", [(0, 0), (0, 6)], ids=str)
def test_a_model_that_drafts_for_itself_is_always_right(length: int, windows: tuple[int, int]) -> None:
    engine = make_engine(toy(windows=windows), drafts := toy(windows=windows), length, length)
    before, count = len(drafts.steps), 33
    outputs = engine.generate(PROMPTS[:4], greedy(count))
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert output.outputs[0].token_ids == toy(windows=windows).dense_greedy(prompt, count)
    stats = engine.stats()
    assert stats["spec_decode_num_accepted_tokens"] == stats["spec_decode_num_draft_tokens"] > 0
    assert stats["steps"] == 1 + -(-(count - 1) // (1 + length))
    # Prompts are computed with the first drafts, later at most the last draft and the token behind it.
    assert drafts.steps[before][0] == sum(map(len, PROMPTS[:4])) + 4
    assert {tokens for tokens, *_ in drafts.steps[before + 1 :]} <= {4, 8}
    assert len(drafts.steps) - before == length * (stats["steps"] - 1)
    check_empty(engine)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_tokens_are_those_without_a_draft_model(kind: str, sizes: str, ahead: bool) -> None:
    def run(engine: Engine) -> list[Any]:
        params = [SamplingParams(seed=i, max_tokens=10 + 3 * i, **PARAMS[kind]) for i in range(len(PROMPTS))]
        outputs = engine.generate(PROMPTS, params)
        turns = [[*o.prompt_token_ids, *o.outputs[0].token_ids, 11] for o in outputs[:3]]
        outputs += engine.generate(turns, params[:3])
        return [[(c.token_ids, c.finish_reason, c.logprobs) for c in output.outputs] for output in outputs]

    options = {"max_model_len": 60, "async_scheduling": ahead, **SIZES[sizes]}
    lengths = iter([7, 3, 1, 3, 0, 7] * 1000)
    engine = make_engine(None, Wavering(), 7, lambda: next(lengths), **options)
    assert run(engine) == run(make_engine(None, None, **options))
    stats = engine.stats()
    assert stats["spec_decode_num_draft_tokens"] > 0
    assert kind == "seeded" or stats["spec_decode_num_accepted_tokens"] > 0
    assert kind != "greedy" or stats["spec_decode_num_accepted_tokens"] < stats["spec_decode_num_draft_tokens"]
    assert not stats["drafters_failed"]
    check_empty(engine)


def test_steps_of_the_draft_model_have_few_sizes() -> None:
    drafts = Wavering()
    engine = make_engine(toy(), drafts, 7, 7)
    engine.generate([[n, n + 1, n + 2] for n in (3, 20, 40, 60)], greedy(40))
    sizes = {tokens // sequences for tokens, sequences, _ in drafts.steps[10:]}
    assert sizes <= {1, 2, 4, 8} and len(sizes) > 1
    assert all(tokens % sequences == 0 for tokens, sequences, _ in drafts.steps[10:])


@pytest.mark.parametrize("pause", [0, 3])
def test_rejected_drafts_are_written_over(pause: int) -> None:
    """Behind them a model that drafts for itself is right again, also if it was not asked for some steps."""
    drafts = toy()
    engine = make_engine(toy(), drafts, 7, 7)
    turns = cycle([7, *[0] * pause])
    drafting_of(engine).lengths.to_compute = lambda drafter, asking, *given: (
        next(turns),
        [each.request for each in asking],
    )
    wrong = iter([3, 9, 10, 20, 37])
    turn, following = 0, next(wrong)

    def spoil(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal turn, following
        turn += 1
        if turn != following:
            return logits
        following = next(wrong, 0)
        return logits.roll(1, -1)

    drafts.change_logits = spoil
    outcomes: list[tuple[int, int]] = []
    drafting_of(engine).lengths.note = lambda request, name, *outcome: outcomes.append(outcome)
    (output,) = engine.generate([PROMPTS[2]], greedy(60))
    assert output.outputs[0].token_ids == toy().dense_greedy(PROMPTS[2], 60)
    # Calls 9 and 10 are of one chain.
    assert [accepted for count, accepted in outcomes if accepted < count] == [2, 1, 5, 1]
    check_empty(engine)


def test_prompts_are_computed_in_chunks() -> None:
    drafts = toy()
    engine = make_engine(toy(), drafts, 3, 3, max_num_batched_tokens=10)
    before = len(drafts.steps)
    engine.generate([list(range(50)), [3, 4]], greedy(20))
    assert max([tokens for tokens, *_ in drafts.steps[before:]]) == 10
    assert engine.stats()["spec_decode_num_accepted_tokens"] == engine.stats()["spec_decode_num_draft_tokens"] > 0


def test_a_request_without_room_has_no_drafts_and_preempts_nobody() -> None:
    drafts = toy()
    engine = make_engine(toy(), drafts, 7, 7)
    drafter = drafter_of(engine)
    pool = drafter.blocks.pools[0]
    held = pool.take(pool.num_free - 9)
    outputs = engine.generate(PROMPTS[:3], greedy(24))
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert output.outputs[0].token_ids == toy().dense_greedy(prompt, 24)
    stats = engine.stats()
    assert stats["spec_decode_num_accepted_tokens"] and stats["preemptions"] == 0 and not stats["drafters_failed"]
    assert stats["spec_decode_num_accepted_tokens"] < 60
    for block in held:
        pool.release(block)
    check_empty(engine)


def test_cancelled_and_interrupted_requests_free_their_blocks() -> None:
    drafts = toy()
    engine = make_engine(toy(), drafts, 3, 3)
    for number, prompt in enumerate(PROMPTS[:4]):
        engine.submit(prompt, greedy(40), request_id=str(number))
    for _ in range(3):
        engine.step()
    assert drafter_of(engine).blocks.num_used_blocks
    engine.cancel_many(["0", "2"])
    assert len(drafter_of(engine)._sequences) == 2

    def interrupt(tokens: torch.Tensor) -> None:
        raise KeyboardInterrupt

    drafts.before_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    drafts.before_call = None
    engine.cancel("1")
    assert not drafter_of(engine)._sequences, "they are computed again"
    while engine.has_unfinished():
        for output in engine.step():
            if output.request_id == "3":
                assert (
                    output.outputs[0].token_ids
                    == toy().dense_greedy(PROMPTS[3], 40)[: len(output.outputs[0].token_ids)]
                )
    check_empty(engine)


def test_a_draft_model_that_raises_drafts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    drafts = toy()
    engine = make_engine(toy(), drafts)
    drafting_of(engine).lengths.seconds.of = lambda rows: 1.0
    drafter_of(engine).seconds.of = lambda rows: 0.0  # type: ignore[method-assign]

    def fail(tokens: torch.Tensor) -> None:
        raise RuntimeError("no memory")

    drafts.before_call = fail
    outputs = engine.generate(PROMPTS[:3], greedy(30))
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert output.outputs[0].token_ids == toy().dense_greedy(prompt, 30)
    stats = engine.stats()
    # After eight steps it rests.
    assert stats["drafters_failed"] == 8 and not stats["spec_decode_num_draft_tokens"]
    assert len([record for record in caplog.records if "no memory" in record.message]) == 1
    check_empty(engine)


def test_positions_beyond_the_draft_models_have_no_drafts() -> None:
    engine = make_engine(toy(), toy(max_model_len=20), 3, 3)
    (output,) = engine.generate([PROMPTS[0]], greedy(60))
    assert output.outputs[0].token_ids == toy().dense_greedy(PROMPTS[0], 60)
    assert 8 <= engine.stats()["spec_decode_num_accepted_tokens"] <= 17


def test_ids_that_the_draft_model_lacks_do_no_harm() -> None:
    engine = make_engine(toy(), toy(vocab_size=60), 3, 3)
    outputs = engine.generate([[90, 91, 92], [3, 4]], greedy(30))
    for prompt, output in zip([[90, 91, 92], [3, 4]], outputs, strict=True):
        assert output.outputs[0].token_ids == toy().dense_greedy(prompt, 30)
    assert not engine.stats()["drafters_failed"]


def test_the_cost_of_drafting_counts() -> None:
    """A model as large as the target's is always right, and still no gain."""
    engine = make_engine(toy(), toy())
    lengths, drafter = drafting_of(engine).lengths, drafter_of(engine)
    lengths.seconds.of = lambda rows: 1.0
    drafter.seconds.of = lambda rows: 0.0  # type: ignore[method-assign]
    for rows in (2, 4, 8) * 2:  # which are recorded now
        lengths.measure(1, rows, 1.0)
    asking: Any = [Asking(ToyRequest(), 7)]  # type: ignore[arg-type]

    def length() -> int:
        return lengths.to_compute("draft_model", asking, 1, 0, 99, 7, drafter.seconds_of)[0]  # type: ignore[no-any-return]

    assert length() == 7
    drafter.seconds.of = lambda rows: 0.5  # type: ignore[method-assign]
    assert length() == 1
    drafter.seconds.of = lambda rows: 1.0  # type: ignore[method-assign]
    assert length() == 0


class ToyRequest:
    """Can be a key."""


def test_states_are_refused() -> None:
    with pytest.raises(ValueError, match="keeps a state per sequence"):
        make_engine(toy(), ToyStateProgram())


def test_an_engine_needs_the_program() -> None:
    with pytest.raises(ValueError, match="needs draft_program="):
        Engine(toy(), block_size=4, num_blocks=8, speculative_config={"method": "draft_model", "model": "x"})


@pytest.mark.parametrize("with_kv", [True, False], ids=["hybrid", "state"])
def test_a_model_with_states_can_have_a_draft_model(with_kv: bool) -> None:
    target = ToyStateProgram(with_kv=with_kv)
    answers = {tuple(prompt): target.dense_greedy(prompt, 30) for prompt in PROMPTS[:3]}
    engine = make_engine(target, toy(vocab_size=target.vocab_size), 3, 3)
    outputs = engine.generate(PROMPTS[:3], greedy(22))
    assert [o.outputs[0].token_ids for o in outputs] == [answers[tuple(prompt)][:22] for prompt in PROMPTS[:3]]
    assert engine.stats()["spec_decode_num_draft_tokens"] > 30 and target.mistakes == []
    check_empty(engine)
