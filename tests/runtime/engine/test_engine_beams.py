"""Beam search in the engine: the same results as a search without a cache, whatever happens to the blocks."""

from __future__ import annotations

import functools
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.runtime.batching import POLICIES, QueueFull
from torch_pagoda.runtime.engine import engine as engine_module
from torch_pagoda.runtime.engine.beam_submission import BeamSubmission
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.outputs import BeamSearchOutput, Progress
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.sampling.beam_search import BeamSearch, Hypothesis
from torch_pagoda.runtime.sampling.logprobs import top_logprobs

from toy_program import ToyProgram, character_tokenizer

EOS = (3, 9, 11, 40)
PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [60, 61], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
PARAMS = BeamSearchParams(4, 10)
DENSE = ToyProgram()
TEXTS = ["Hello", "a", "Some longer prompt"]
SWAP: dict[str, Any] = {"preemption": "swap", "swap_space": 1 << 20}


@functools.cache
def last_logits(tokens: tuple[int, ...]) -> torch.Tensor:
    return DENSE.dense_logits(tokens)[-1]


@functools.cache
def searched(prompt: tuple[int, ...], params: BeamSearchParams) -> list[Hypothesis]:
    """The search on a model that computes every beam from its first token on."""
    search = BeamSearch(params, EOS)
    while not search.is_done:
        logits = torch.stack([last_logits((*prompt, *beam.token_ids)) for beam in search.beams])
        search.advance(*top_logprobs(logits, search.num_candidates))
    return search.hypotheses


def make_engine(program: ToyProgram | None = None, **options: Any) -> Engine:
    given = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 32, "eos_token_ids": EOS, **options}
    return Engine(program or ToyProgram(), **given)


def assert_found(outputs: Sequence[BeamSearchOutput], prompts: Sequence[list[int]], params: object = PARAMS) -> None:
    for i, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        own = params[i] if isinstance(params, list) else params
        assert isinstance(own, BeamSearchParams)
        expected = searched(tuple(prompt), own)
        assert output.error is None and output.prompt_token_ids == prompt
        assert [tuple(text.token_ids) for text in output.sequences] == [text.token_ids for text in expected]
        assert [text.finish_reason for text in output.sequences] == [text.finish_reason for text in expected]
        for got, want in zip(output.sequences, expected, strict=True):
            assert got.score == pytest.approx(want.score, rel=1e-4, abs=1e-5)
            assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, rel=1e-4, abs=1e-5)


def assert_idle(engine: Engine) -> None:
    engine.batcher.check()
    engine.block_manager.finish_copies()  # as the next step would begin
    assert engine.block_manager.num_used_blocks == 0
    assert engine.block_manager.stats()["host_blocks_used"] == 0
    assert not engine.has_unfinished() and not engine.batcher.has_unfinished()
    assert not engine._core.state.submissions and not engine._core.state.completions
    assert engine.runner._requests == [None] * engine.runner.max_num_seqs


def search_checked(engine: Engine, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[BeamSearchOutput]:
    """Every invariant is checked after every step."""

    def check(progress: Progress) -> None:
        engine.batcher.check()

    outputs = engine.beam_search(prompts, params, on_progress=check)
    assert_idle(engine)
    return outputs


def searches(engine: Engine) -> list[BeamSubmission]:
    return [s for s in engine._core.state.submissions.values() if isinstance(s, BeamSubmission)]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("budget", [2048, 9])
def test_equals_a_search_without_a_cache(block_size: int, budget: int) -> None:
    """Prompts of different lengths, several widths and penalties at once; whole prompts, and prompts in chunks."""
    engine = make_engine(block_size=block_size, max_num_batched_tokens=budget)
    params = [
        BeamSearchParams(1, 6),
        BeamSearchParams(2, 12, length_penalty=0.0),
        BeamSearchParams(5, 9, early_stopping=True),
        BeamSearchParams(3, 8, length_penalty=-1.0),
        BeamSearchParams(8, 7, early_stopping="never", length_penalty=2.0),
    ]
    outputs = search_checked(engine, PROMPTS, params)
    assert_found(outputs, PROMPTS, params)
    assert {text.finish_reason for output in outputs for text in output.sequences} == {"stop", "length"}
    assert engine.stats()["preemptions"] == 0 and engine.stats()["copies_on_write"] > 0


def test_ignoring_the_end() -> None:
    params = BeamSearchParams(3, 8, ignore_eos=True)
    outputs = search_checked(make_engine(), PROMPTS, params)
    for output in outputs:
        assert [(len(text.token_ids), text.finish_reason) for text in output.sequences] == [(8, "length")] * 3


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("options", [{"preemption": "recompute"}, SWAP, {"preemption": "auto", "swap_space": 4096}])
def test_a_cache_that_does_not_hold_all_beams(options: dict[str, Any], caching: bool) -> None:
    engine = make_engine(num_blocks=9, enable_prefix_caching=caching, max_num_batched_tokens=16, **options)
    assert_found(search_checked(engine), PROMPTS)
    assert engine.stats()["preemptions"] > 10
    assert (engine.stats()["swaps"] > 0) == ("swap_space" in options) or options["preemption"] == "auto"


def test_one_search_in_a_cache_that_holds_one_beam() -> None:
    """Every beam needs the blocks that its siblings hold while they wait for it."""
    params = BeamSearchParams(4, 12, ignore_eos=True)
    want = make_engine().beam_search([PROMPTS[1]], params)[0]
    engine = make_engine(num_blocks=4, max_model_len=14)
    (output,) = search_checked(engine, [PROMPTS[1]], params)
    assert [text.token_ids for text in output.sequences] == [text.token_ids for text in want.sequences]
    assert output.metrics.num_preemptions > 4 == engine.stats()["blocks_total"]


@pytest.mark.parametrize("seats", [1, 2, 3])
@pytest.mark.parametrize("options", [{"preemption": "recompute"}, SWAP])
def test_fewer_seats_than_beams(seats: int, options: dict[str, Any]) -> None:
    """Those who wait for their siblings give up their seats."""
    program = ToyProgram()
    engine = make_engine(program, max_num_seqs=seats, **options)
    assert_found(search_checked(engine), PROMPTS)
    assert engine.stats()["preemptions"] > 0
    assert max(step[1] for step in program.steps) == seats


@settings(max_examples=20, deadline=None)
@given(
    which=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=4),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 9),
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare_blocks=st.integers(0, 12),
    seats=st.integers(1, 9),
    budget=st.integers(1, 24),
    caching=st.booleans(),
    policy=st.sampled_from(sorted(POLICIES)),
    swap=st.booleans(),
    others=st.integers(0, 3),
)
def test_nothing_changes_the_results(
    which: list[int],
    width: int,
    max_tokens: int,
    block_size: int,
    spare_blocks: int,
    seats: int,
    budget: int,
    caching: bool,
    policy: str,
    swap: bool,
    others: int,
) -> None:
    longest = 36
    engine = make_engine(
        block_size=block_size,
        num_blocks=-(-longest // block_size) + spare_blocks,
        max_model_len=longest,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        policy=policy,
        **(SWAP if swap else {"preemption": "recompute"}),
    )
    for i in range(others):
        engine.submit(PROMPTS[i], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), f"other {i}")
    prompts = [PROMPTS[i] for i in which]
    params = BeamSearchParams(width, max_tokens)
    outputs = engine.beam_search(prompts, params, on_progress=lambda progress: engine.batcher.check())
    assert_found(outputs, prompts, params)
    finished = {}
    while engine.has_unfinished():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    assert sorted(finished) == [f"other {i}" for i in range(others)]
    for i in range(others):
        assert finished[f"other {i}"].outputs[0].token_ids == DENSE.dense_greedy(PROMPTS[i], 6)
    assert_idle(engine)


@pytest.mark.parametrize("size", [4, 16])
def test_beams_share_the_blocks_of_what_they_share(size: int) -> None:
    """As many blocks as there are different beginnings; who writes into a shared block copies it, but the last."""
    engine = make_engine(block_size=size)
    prompt = list(range(30, 65))
    params = BeamSearchParams(6, 12)
    used: list[int] = []
    copies = 0

    def look(progress: Progress) -> None:
        nonlocal copies
        engine.batcher.check()
        computed = [(*prompt, *beam.token_ids)[:-1] for search in searches(engine) for beam in search.search.beams]
        if not computed:
            return
        length = len(computed[0])
        ends = [*range(size, length, size), length]
        blocks = Counter(tokens[:end] for tokens in computed for end in ends)
        used.append(engine.block_manager.num_used_blocks)
        assert used[-1] == len(blocks)
        own = len(ends) - len(prompt) // size  # of each beam: what lies beyond the prompt's full blocks
        assert used[-1] <= len(prompt) // size + len(computed) * own
        if length % size:
            copies += sum(count - 1 for tokens, count in blocks.items() if len(tokens) == length)

    assert_found(engine.beam_search([prompt], params, on_progress=look), [prompt], params)
    assert engine.stats()["copies_on_write"] == copies > 0
    assert len(used) == 11 and used[0] == -(-len(prompt) // size)
    assert_idle(engine)


def test_a_prompt_is_computed_once() -> None:
    program = ToyProgram()
    prompt = list(range(30, 65))
    engine = make_engine(program)
    (output,) = search_checked(engine, prompt, BeamSearchParams(4, 5, ignore_eos=True))
    assert [step[0] for step in program.steps] == [35, 4, 4, 4, 4]
    assert output.metrics.num_generated_tokens == 17
    assert engine.stats()["generated_tokens"] == 17
    metrics = output.metrics
    assert metrics.first_scheduled_time is not None and metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time < metrics.first_scheduled_time < metrics.first_token_time < metrics.finished_time


def test_a_second_search_finds_the_prompt_in_the_cache() -> None:
    engine = make_engine()
    first, second = (search_checked(engine, [PROMPTS[2]])[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 24)
    assert_found([first, second], [PROMPTS[2]] * 2)
    salted = engine.beam_search([PROMPTS[2]], PARAMS, cache_salt="x")[0]
    assert salted.num_cached_tokens == 0
    assert_found([salted], [PROMPTS[2]])


@pytest.mark.parametrize("options", [{}, {"num_blocks": 14, "max_num_batched_tokens": 16}])
def test_beside_ordinary_requests(options: dict[str, Any]) -> None:
    engine = make_engine(**options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=5, logprobs=2, ignore_eos=True)
    want = make_engine().generate([PROMPTS[3]], drawn)[0]
    names = [engine.submit(prompt, params) for prompt in PROMPTS]
    name = engine.submit(PROMPTS[3], drawn)
    assert_found(engine.beam_search(PROMPTS, PARAMS, on_progress=lambda progress: engine.batcher.check()), PROMPTS)
    finished = {}
    while engine.has_unfinished():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    for one, prompt in zip(names, PROMPTS, strict=True):
        assert finished[one].outputs[0].token_ids == DENSE.dense_greedy(prompt, 12)
    assert [c.token_ids for c in finished[name].outputs] == [c.token_ids for c in want.outputs]
    assert_idle(engine)


def test_text_is_without_the_end_token() -> None:
    tokenizer: Any = character_tokenizer()
    program = ToyProgram(vocab_size=258)
    engine = make_engine(program, tokenizer=tokenizer, eos_token_ids=[256, *range(0, 250, 5)])
    reasons = set()
    for prompt, output in zip(TEXTS, search_checked(engine, TEXTS, BeamSearchParams(4, 6)), strict=True):
        assert output.prompt == prompt
        for text in output.sequences:
            reasons.add(text.finish_reason)
            ids = text.token_ids[:-1] if text.finish_reason == "stop" else text.token_ids
            assert text.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert reasons == {"stop", "length"}


def test_the_length_is_bounded_by_the_model() -> None:
    engine = make_engine(num_blocks=7)
    (output,) = search_checked(engine, PROMPTS[2], BeamSearchParams(3, 50, ignore_eos=True))
    assert {len(text.token_ids) for text in output.sequences} == {3}


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 9, **SWAP}, {"num_blocks": 9, "enable_prefix_caching": False}]
)
def test_a_model_that_changes_its_keys_at_a_length(options: dict[str, Any]) -> None:
    """From then on every beam is computed anew, in blocks of its own."""
    program = ToyProgram()
    program.restart_length = program.rope_switch = 7
    params = BeamSearchParams(4, 10)
    prompts = [PROMPTS[0], PROMPTS[3]]
    engine = make_engine(program, **options)
    assert_found(search_checked(engine, prompts, params), prompts, params)
    plain = make_engine(**options)
    search_checked(plain, prompts, params)
    assert engine.stats()["computed_tokens"] > plain.stats()["computed_tokens"]


# -- failures


def test_a_callback_that_raises_frees_everything() -> None:
    engine = make_engine(num_blocks=14)
    for limit in (1, 5, 12):

        def fail(progress: Progress, limit: int = limit) -> None:
            if progress.generated_tokens > limit:
                raise LookupError("enough")

        with pytest.raises(LookupError, match="enough"):
            engine.beam_search(PROMPTS, PARAMS, on_progress=fail)
        assert_idle(engine)
    assert_found(search_checked(engine), PROMPTS)


def test_a_failing_model_ends_the_searches_that_it_fails_for() -> None:
    """Whoever sees token 61 in a step of its own fails; the others are computed again without it."""
    program = ToyProgram()
    engine = make_engine(program)

    def fail(tokens: torch.Tensor) -> None:
        if 61 in tokens:
            raise RuntimeError("out of luck")

    program.before_call = fail
    outputs = search_checked(engine)
    failed = outputs[3]
    assert failed.error == "the model step failed with RuntimeError: out of luck" and failed.sequences == []
    assert_found([*outputs[:3], outputs[4]], [*PROMPTS[:3], PROMPTS[4]])
    assert engine.stats()["failed"] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_beam_with_unusable_logits_ends_its_search(value: float) -> None:
    program = ToyProgram()
    engine = make_engine(program)
    second = searched(tuple(PROMPTS[0]), PARAMS)[0].token_ids[0]

    def spoil(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[tokens == second] = value
        return logits

    program.change_logits = spoil
    (output,) = search_checked(engine, [PROMPTS[0]])
    assert output.error is not None and "NaN, infinity" in output.error
    assert output.metrics.num_generated_tokens == 1
    program.change_logits = None
    assert_found(search_checked(engine), PROMPTS)


def test_a_deadline_and_a_cancel_end_a_search() -> None:
    engine = make_engine()

    def cancel(progress: Progress) -> None:
        engine.batcher.check()
        for search in searches(engine):
            if search.prompt_token_ids == PROMPTS[0] and len(search.search.beams[0].token_ids) == 3:
                assert engine.cancel(search.request_id)
                assert not engine.cancel(search.request_id)

    cancelled, late, whole = engine.beam_search(PROMPTS[:3], PARAMS, deadline=[None, 1e-9, None], on_progress=cancel)
    assert cancelled.error == "the search was cancelled"
    assert late.error == "its deadline has passed" and late.sequences == []
    assert_found([whole], PROMPTS[2:3])
    assert_idle(engine)


def test_the_queue_limit_counts_prompts_and_not_beams() -> None:
    engine = make_engine(max_queue=2, max_num_seqs=2)
    assert_found(search_checked(engine, PROMPTS[:2]), PROMPTS[:2])
    with pytest.raises(QueueFull):
        engine.beam_search(PROMPTS[:3], PARAMS)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (PROMPTS[:2], [PARAMS], "params has 1 entries for 2 prompts"),
        (PROMPTS[:2], [PARAMS, SamplingParams()], r"params\[1\]=SamplingParams"),
        (PROMPTS[:1], None, "params=None is not BeamSearchParams"),
        ([[5], [500]], PARAMS, r"prompts\[1\]\[0\]=500"),
        (["text"], PARAMS, "is text"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(prompts: Any, params: Any, words: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=words) as caught:
        engine.beam_search(prompts, params)
    assert "\n" not in str(caught.value)
    assert_idle(engine)


# -- interrupts

RUNTIME = Path(engine_module.__file__).parents[1]
TRACED = {
    str(RUNTIME / f"{name}.py")
    for name in (
        *("engine/engine", "engine/core", "engine/state", "engine/step_runner", "engine/beam_submission"),
        *("engine/model_runner", "engine/submission"),
        *("sampling/beam_search", "batching/batcher", "blocks/manager", "blocks/tables"),
    )
}
OF_A_STEP = {
    *(
        "_take_output",
        "take_candidates",
        "update",
        "_advance",
        "next_step",
        "end",
        "finish",
        "branch",
        "_accept",
        "_share",
        "pause",
        "resume",
    ),
}


def test_the_files_that_are_traced_are_there():
    assert all(Path(path).is_file() for path in TRACED)


@functools.cache
def only_returns_a_name(path: str, line: int) -> bool:
    """No signal arrives between such a line and the one before."""
    words = linecache.getline(path, line).split()
    return words[:1] == ["return"] and len(words) == 2 and words[1].isidentifier()


def run_traced(
    action: Callable[[], Any], interrupt_at: int | None = None, functions: Collection[str] | None = None
) -> int:
    """Run it and count the lines of the runtime that it executes, of these functions; KeyboardInterrupt comes before
    line number ``interrupt_at``."""
    count = 0

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "line" and not only_returns_a_name(frame.f_code.co_filename, frame.f_lineno):
            if count == interrupt_at:
                raise KeyboardInterrupt
            count += 1
        return on_line

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        return on_line if code.co_filename in TRACED and (not functions or code.co_name in functions) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("options", [{"preemption": "recompute"}, SWAP])
def test_an_interrupted_search_is_dropped_and_others_go_on(options: dict[str, Any]) -> None:
    engine = make_engine(num_blocks=12, max_num_seqs=6, **options)
    params = BeamSearchParams(3, 5)
    want = DENSE.dense_greedy(PROMPTS[0], 6)

    def use() -> None:
        engine.beam_search([PROMPTS[2], PROMPTS[3]], params)

    lines = run_traced(use)
    interrupted = 0
    for run in range(12):
        name = engine.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        try:
            run_traced(use, run * lines // 12 + run % 7)
        except KeyboardInterrupt:
            interrupted += 1
        finished = {}
        while engine.has_unfinished():
            finished.update({output.request_id: output for output in engine.step() if output.finished})
        assert [output.outputs[0].token_ids for output in finished.values()] == [want] and name in finished
        assert_idle(engine)
    assert interrupted > 9
    assert_found(search_checked(engine), PROMPTS)


@pytest.mark.parametrize(("functions", "num_places"), [(None, 12), (OF_A_STEP, 24), ({"finish"}, None)])
def test_a_search_survives_the_interrupts_of_others(
    functions: Collection[str] | None, num_places: int | None
) -> None:
    """Another user of the engine is interrupted once, anywhere in the steps that the search gets in between; None:
    at each of the first lines."""
    engine = make_engine(num_blocks=10, max_num_seqs=5, **SWAP)
    params = BeamSearchParams(3, 5)
    prompts = [PROMPTS[4], PROMPTS[3]]
    lines = 0

    def measure(progress: Progress) -> None:
        nonlocal lines
        lines += run_traced(engine.step, functions=functions)

    assert_found(engine.beam_search(prompts, params, on_progress=measure), prompts, params)
    places = range(24) if num_places is None else range(0, lines, lines // num_places)
    interrupted = 0
    for place in places:
        left: int | None = place

        def disturb(progress: Progress) -> None:
            nonlocal left, interrupted
            if left is not None:
                try:
                    left -= run_traced(engine.step, left, functions)
                except KeyboardInterrupt:
                    interrupted += 1
                    left = None

        assert_found(engine.beam_search(prompts, params, on_progress=disturb), prompts, params)
        assert_idle(engine)
    assert interrupted > len(places) / 2
