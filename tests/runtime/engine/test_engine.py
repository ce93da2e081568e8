from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.outputs import Progress, RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram, character_tokenizer

BYTES: Any = character_tokenizer()
PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [60, 61], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def make_engine(program: ToyProgram | None = None, **options: Any) -> Engine:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **options}
    return Engine(program or ToyProgram(), **settings)


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run_all(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of each request, each of which comes once."""
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
    return finished


def assert_idle(engine: Engine) -> None:
    """Nothing runs, nothing is held, nothing is remembered."""
    engine.batcher.check()
    assert engine.block_manager.num_available_blocks == engine.block_manager.num_blocks
    assert not engine.has_unfinished()
    assert not engine._core.state.submissions and not engine._core.state.completions
    assert engine.runner._requests == [None] * engine.runner.max_num_seqs


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [ToyProgram().dense_greedy(prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("budget", "block_size", "seqs"), [(2048, 16, 8), (7, 4, 8), (1, 1, 2), (16, 3, 1), (5, 16, 3)]
)
def test_tokens_equal_a_dense_forward(budget: int, block_size: int, seqs: int, expected: list[list[int]]) -> None:
    program = ToyProgram()
    engine = make_engine(
        program, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=seqs, num_blocks=128
    )
    outputs = engine.generate(PROMPTS, greedy(12))
    assert tokens(outputs) == expected
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert max(step[0] for step in program.steps) <= budget
    assert max(step[1] for step in program.steps) <= seqs
    assert_idle(engine)


def test_preemption_changes_nothing(expected: list[list[int]]) -> None:
    engine = make_engine(num_blocks=13, block_size=3, max_num_batched_tokens=9)
    outputs = engine.generate(PROMPTS, greedy(12))
    assert engine.stats()["preemptions"] > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == engine.stats()["preemptions"]
    assert tokens(outputs) == expected
    assert_idle(engine)


def test_seeded_draws_depend_on_nothing_else() -> None:
    def params(i: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=12)

    alone = [make_engine().generate([prompt], params(i))[0] for i, prompt in enumerate(PROMPTS)]
    tight = make_engine(num_blocks=13, block_size=3, max_num_batched_tokens=5)
    together = tight.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
    assert tight.stats()["preemptions"] > 0
    assert tokens(together) == tokens(alone)


def test_one_prompt_needs_no_list(expected: list[list[int]]) -> None:
    engine = make_engine()
    for prompt in (PROMPTS[0], tuple(PROMPTS[0]), torch.tensor(PROMPTS[0]), torch.tensor([PROMPTS[0]])):
        assert tokens(engine.generate(prompt, greedy(12))) == expected[:1]
    assert engine.generate([], greedy()) == []


def test_progress_reaches_the_total() -> None:
    seen: list[Progress] = []
    make_engine(max_num_seqs=2).generate(PROMPTS, greedy(4), on_progress=seen.append)
    assert seen[-1] == Progress(finished=5, total=5, generated_tokens=20)
    assert [p.finished for p in seen] == sorted(p.finished for p in seen)
    assert [p.generated_tokens for p in seen] == sorted(p.generated_tokens for p in seen)


def test_a_callback_that_raises_frees_everything(expected: list[list[int]]) -> None:
    engine = make_engine()

    def fail(progress: Progress) -> None:
        if progress.generated_tokens > 6:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        engine.generate(PROMPTS, greedy(), on_progress=fail)
    assert_idle(engine)
    assert tokens(engine.generate(PROMPTS, greedy(12))) == expected


def test_metrics_are_in_order() -> None:
    metrics = make_engine().generate([PROMPTS[0]], greedy(5))[0].metrics
    assert metrics.first_scheduled_time is not None and metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.num_generated_tokens == 5
    assert 0 < (metrics.ttft or 0) <= (metrics.e2e_latency or 0)
    assert (metrics.tpot or 0) > 0 and (metrics.time_in_queue or 0) >= 0


def test_stepwise_gives_growing_outputs(expected: list[list[int]]) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    names = [engine.submit(prompt, greedy(12), request_id=f"r{i}") for i, prompt in enumerate(PROMPTS)]
    assert names == [f"r{i}" for i in range(5)]
    lengths: dict[str, int] = {}
    finished = {}
    while engine.has_unfinished():
        for output in engine.step():
            count = len(output.outputs[0].token_ids)
            assert count == lengths.get(output.request_id, 0) + 1
            lengths[output.request_id] = count
            if output.finished:
                finished[output.request_id] = output
    assert tokens([finished[name] for name in names]) == expected
    assert engine.step() == []
    assert_idle(engine)


def test_ids_are_unique_and_come_back_into_use() -> None:
    engine = make_engine()
    assert engine.submit([1], greedy(1), request_id="0") == "0"
    assert engine.submit([1], greedy(1)) not in {"0"}
    with pytest.raises(ValueError, match="request_id='0' is in use; choose another"):
        engine.submit([1], greedy(1), request_id="0")
    with pytest.raises(ValueError, match="request_id=3 is not plain text"):
        engine.submit([1], greedy(1), request_id=3)  # type: ignore[arg-type]
    assert len(run_all(engine)) == 2
    assert engine.submit([1], greedy(1), request_id="0") == "0"
    assert list(run_all(engine)) == ["0"]


def test_cancel_while_waiting_and_while_running(expected: list[list[int]]) -> None:
    engine = make_engine(max_num_seqs=2)
    names = [engine.submit(prompt, greedy(12)) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    assert engine.cancel(names[0]), "running"
    assert engine.cancel(names[4]), "waiting"
    assert not engine.cancel(names[0]) and not engine.cancel("nobody")
    engine.batcher.check()
    outputs = run_all(engine)
    assert [outputs[name].outputs[0].finish_reason for name in names] == [
        "cancelled",
        *["length"] * 3,
        "cancelled",
    ]
    assert outputs[names[0]].outputs[0].token_ids == expected[0][:3]
    assert outputs[names[4]].outputs[0].token_ids == []
    assert tokens([outputs[name] for name in names[1:4]]) == expected[1:4]
    assert_idle(engine)


def test_cancelling_everything_still_delivers() -> None:
    engine = make_engine()
    name = engine.submit([1, 2], greedy())
    assert engine.cancel(name) and engine.has_unfinished()
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["cancelled"]
    assert_idle(engine)


def test_n_completions_are_merged() -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=6, n=3)
    engine = make_engine(max_num_seqs=2)
    output = engine.generate([PROMPTS[0], PROMPTS[1]], params)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert output.metrics.num_generated_tokens == 18
    for i, completion in enumerate(output.outputs):
        single = engine.generate([PROMPTS[0]], SamplingParams(temperature=1.0, seed=7 + i, max_tokens=6))
        assert completion.token_ids == single[0].outputs[0].token_ids
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
    name = engine.submit(PROMPTS[0], params)
    engine.step()
    assert engine.cancel(name)
    assert [c.finish_reason for c in run_all(engine)[name].outputs] == ["cancelled"] * 3
    assert_idle(engine)


def test_eos_and_stop_tokens(expected: list[list[int]]) -> None:
    ending = expected[0][4]
    first = expected[0].index(ending) + 1
    engine = make_engine(eos_token_ids=[ending, 96])
    output = engine.generate([PROMPTS[0]], greedy(12))[0].outputs[0]
    assert output.token_ids == expected[0][:first]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    output = engine.generate([PROMPTS[0]], greedy(12, ignore_eos=True))[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (expected[0], "length")
    output = make_engine().generate([PROMPTS[0]], greedy(12, stop_token_ids=[ending]))[0].outputs[0]
    assert (output.token_ids, output.stop_reason) == (expected[0][:first], ending)
    output = engine.generate([PROMPTS[0]], greedy(12, min_tokens=10))[0].outputs[0]
    assert len(output.token_ids) >= 10 and ending not in output.token_ids[:10]


def test_the_models_length_ends_a_completion() -> None:
    program = ToyProgram(max_model_len=20)
    engine = make_engine(program)
    assert engine.max_model_len == 20
    output = engine.generate([[1, 2, 3]], greedy(100))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (17, "length")
    assert output.token_ids == program.dense_greedy([1, 2, 3], 17)
    exactly = make_engine(num_blocks=5).generate([list(range(19))], greedy(100))[0].outputs[0]
    assert len(exactly.token_ids) == 1, "a request may fill the whole cache"


@pytest.fixture()
def text_engine() -> Engine:
    return make_engine(ToyProgram(vocab_size=258), tokenizer=BYTES, eos_token_ids=[256])


def test_text_in_and_out(text_engine: Engine) -> None:
    prompts: list[Any] = ["Hello", [1, 2]]
    output = text_engine.generate(prompts, greedy(10, logprobs=2))
    assert output[0].prompt == "Hello" and output[1].prompt is None
    assert output[0].prompt_token_ids == BYTES("Hello").input_ids
    completion = output[0].outputs[0]
    assert completion.text == BYTES.decode(completion.token_ids, skip_special_tokens=True)
    assert completion.logprobs is not None and len(completion.logprobs) == 10
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank == 1 and len(entry) == 2
        assert all(value.decoded_token == BYTES.decode([i]) for i, value in entry.items())
    total = sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)


def favor(text: str) -> Any:
    """Logits that make the output spell ``text``, whatever the prompt, starting anew after its last byte."""
    spelled = BYTES(text).input_ids
    assert len(set(spelled)) == len(spelled), "each byte must say what comes next"
    following = dict(zip(spelled, [*spelled[1:], 256], strict=True))

    def change(logits: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        chosen = [following.get(int(token), spelled[0]) for token in asked]
        return logits.clone().scatter_(1, torch.tensor(chosen)[:, None], 1e4)

    return change


def spelling_engine(text: str) -> Engine:
    program = ToyProgram(vocab_size=258)
    program.change_logits = favor(text)
    return make_engine(program, tokenizer=BYTES, eos_token_ids=[256])


def test_eos_has_no_text() -> None:
    engine = spelling_engine("abcd")
    completion = engine.generate(["!"], greedy(20))[0].outputs[0]
    assert (completion.text, completion.finish_reason) == ("abcd", "stop")
    assert completion.token_ids[-1] == 256
    completion = engine.generate(["!"], greedy(20, stop_token_ids=BYTES("c").input_ids))[0].outputs[0]
    assert (completion.text, completion.stop_reason) == ("ab", BYTES("c").input_ids[0])


def test_stop_strings_end_the_text() -> None:
    engine = spelling_engine("The quick")
    for stop, text, reason in (
        (["ick"], "The qu", "ick"),
        ("e q", "Th", "e q"),
        (["zzz", "T"], "", "T"),
        (["zzz"], "The quick", None),
    ):
        completion = engine.generate(["!"], greedy(20, stop=stop))[0].outputs[0]
        assert (completion.text, completion.finish_reason) == (text, "stop")
        assert completion.stop_reason == reason
        pieces = list(engine.stream("!", greedy(20, stop=stop)))
        assert "".join(piece.text for piece in pieces) == text
        assert [t for piece in pieces for t in piece.token_ids] == completion.token_ids
    completion = engine.generate(["!"], greedy(20, stop="Th", min_tokens=5))[0].outputs[0]
    assert completion.text == "The quick"


def test_stream_gives_every_token_once(text_engine: Engine) -> None:
    whole = text_engine.generate(["Some prompt"], greedy(15, logprobs=0))[0].outputs[0]
    pieces = list(text_engine.stream("Some prompt", greedy(15, logprobs=0)))
    assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
    assert "".join(piece.text for piece in pieces) == whole.text
    streamed = [entry for piece in pieces for entry in piece.logprobs or []]
    assert [list(entry) for entry in streamed] == [list(entry) for entry in whole.logprobs or []]
    # The prompt came from the prefix cache this time: another shape of step, other rounding.
    for mine, theirs in zip(streamed, whole.logprobs or [], strict=True):
        for token, logprob in mine.items():
            assert logprob.logprob == pytest.approx(theirs[token].logprob, abs=1e-5)
            assert (logprob.rank, logprob.decoded_token) == (theirs[token].rank, theirs[token].decoded_token)
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].finish_reason == "length" and pieces[0].finish_reason is None
    assert all(len(piece.token_ids) == 1 for piece in pieces)
    assert_idle(text_engine)


def test_stream_of_several_completions() -> None:
    params = SamplingParams(seed=3, n=2, max_tokens=5)
    engine = make_engine()
    whole = engine.generate([PROMPTS[0]], params)[0]
    pieces = list(engine.stream(PROMPTS[0], params))
    for completion in whole.outputs:
        own = [piece for piece in pieces if piece.index == completion.index]
        assert [t for piece in own for t in piece.token_ids] == completion.token_ids
        assert sum(piece.finished for piece in own) == 1


def test_closing_a_stream_early_cancels_it() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS[0], greedy())
    next(stream)
    assert engine.block_manager.num_used_blocks
    stream.close()  # type: ignore[attr-defined]
    assert_idle(engine)
    for piece in engine.stream(PROMPTS[0], greedy()):
        assert not piece.finished
        break
    gc.collect()
    assert_idle(engine)
    engine.stream(PROMPTS[0], greedy())  # never started
    assert_idle(engine)


def test_streams_generate_and_submit_mix(expected: list[list[int]]) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    name = engine.submit(PROMPTS[2], greedy(12))
    first, second = engine.stream(PROMPTS[0], greedy(12)), engine.stream(PROMPTS[1], greedy(12))
    got: list[list[int]] = [[], []]
    for _ in range(2):
        got[0] += next(first).token_ids
        got[1] += next(second).token_ids
    assert tokens(engine.generate(PROMPTS[3:], greedy(12))) == expected[3:]
    for piece in first:
        got[0] += piece.token_ids
    for piece in second:
        got[1] += piece.token_ids
    assert got == expected[:2]
    outputs = run_all(engine)
    assert list(outputs) == [name], "what generate and stream ran is theirs alone"
    assert outputs[name].outputs[0].token_ids == expected[2]
    assert_idle(engine)


def test_a_stream_can_be_cancelled_by_its_id() -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS[0], greedy())
    piece = next(stream)
    assert engine.cancel(piece.request_id)
    rest = list(stream)
    assert [(p.finished, p.finish_reason) for p in rest] == [(True, "cancelled")]
    assert_idle(engine)


def test_cancel_from_the_callback_of_generate(expected: list[list[int]]) -> None:
    engine = make_engine()

    def cancel_first(progress: Progress) -> None:
        if engine._core.state.submissions:
            engine.cancel(min(engine._core.state.submissions, key=int))

    outputs = engine.generate(PROMPTS, greedy(12), on_progress=cancel_first)
    assert all(output.finished for output in outputs)
    assert outputs[0].outputs[0].finish_reason == "cancelled"
    for output, want in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == want[: len(output.outputs[0].token_ids)]
    assert_idle(engine)


def test_an_error_of_the_device_reaches_the_request_with_its_remedy() -> None:
    program = ToyProgram()

    def lose_the_device(ids: torch.Tensor) -> None:
        raise RuntimeError("ACL stream synchronize failed, error code:507035\nEZ9999: Inner Error!")

    program.before_call = lose_the_device
    outputs = make_engine(program).generate(PROMPTS, greedy(4))
    for output in outputs:
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].error is not None
        assert "DeviceError: an operator failed on the vector cores (507035); restart" in output.outputs[0].error
        assert output.outputs[0].error.endswith("error code:507035")


def test_a_request_that_breaks_the_model_fails_alone(expected: list[list[int]]) -> None:
    program = ToyProgram()

    def break_on_60(ids: torch.Tensor) -> None:
        if 60 in ids.tolist():
            raise RuntimeError("no 60\nsecond line")

    program.before_call = break_on_60
    engine = make_engine(program, max_num_batched_tokens=16)
    outputs = engine.generate(PROMPTS, greedy(12))
    broken = outputs[3].outputs[0]
    assert broken.finish_reason == "error"
    assert broken.error == "the model step failed with RuntimeError: no 60"
    # Other requests may produce token 60 themselves, and then fail from there on.
    for i in (0, 1, 2, 4):
        want = expected[i]
        if 60 in want[:-1]:
            want = want[: want.index(60) + 1]
        assert outputs[i].outputs[0].token_ids == want
    assert engine.stats()["failed"] == sum(o.outputs[0].finish_reason == "error" for o in outputs)
    assert_idle(engine)


def test_a_model_that_fails_only_in_company_fails_nobody(expected: list[list[int]]) -> None:
    program = ToyProgram()

    def no_company(ids: torch.Tensor) -> None:
        if program.steps[-1][1] > 1:
            raise MemoryError("too many")

    program.before_call = no_company
    engine = make_engine(program)
    assert tokens(engine.generate(PROMPTS, greedy(12))) == expected
    assert_idle(engine)


def test_a_model_that_always_fails_ends_every_request() -> None:
    program = ToyProgram()

    def fail(ids: torch.Tensor) -> None:
        raise RuntimeError("broken")

    program.before_call = fail
    engine = make_engine(program, max_num_seqs=2)
    outputs = engine.generate(PROMPTS, greedy())
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 5
    assert_idle(engine)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_request(
    bad: float, temperature: float, expected: list[list[int]]
) -> None:
    program = ToyProgram()

    def spoil(logits: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[asked == PROMPTS[3][-1], 17] = bad
        return logits

    program.change_logits = spoil
    engine = make_engine(program)
    params = [greedy(12)] * 5
    params[3] = SamplingParams(temperature=temperature, max_tokens=12, seed=1)
    outputs = engine.generate(PROMPTS, params)
    assert outputs[3].outputs[0].finish_reason == "error"
    assert "NaN" in (outputs[3].outputs[0].error or "")
    for i in (0, 1, 2, 4):
        if PROMPTS[3][-1] not in expected[i]:
            assert outputs[i].outputs[0].token_ids == expected[i]
    assert_idle(engine)


class BrokenTokenizer:
    """Encodes, but decodes only the prompt's tokens."""

    def __call__(self, text: str) -> Any:
        return BYTES(text)

    def decode(self, token_ids: Any, **kwargs: Any) -> str:
        if len(token_ids) > 4:
            raise OverflowError("cannot decode")
        return BYTES.decode(token_ids, **kwargs)


@pytest.mark.parametrize("stop", [None, "xyz"])
def test_text_that_cannot_be_decoded_fails_its_request(stop: str | None) -> None:
    engine = make_engine(ToyProgram(vocab_size=258), tokenizer=BrokenTokenizer())
    params = [greedy(10, stop=stop), greedy(1, stop=stop)]
    outputs = engine.generate(["abc", "abc"], params)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length"]
    assert "tokenizer cannot decode" in (outputs[0].outputs[0].error or "")
    name = engine.submit("abc", greedy(10, stop=stop))
    assert run_all(engine)[name].outputs[0].finish_reason == "error"
    pieces = list(engine.stream("abc", greedy(10, stop=stop)))
    assert pieces[-1].finish_reason == "error" and pieces[-1].finished
    assert sum(piece.finished for piece in pieces) == 1
    assert_idle(engine)


def test_ctrl_c_in_the_model_frees_generate_and_keeps_the_others(expected: list[list[int]]) -> None:
    program = ToyProgram()
    engine = make_engine(program, max_num_batched_tokens=8)
    name = engine.submit(PROMPTS[0], greedy(12))
    engine.step()

    def interrupt(ids: torch.Tensor) -> None:
        if len(program.steps) > 5:
            raise KeyboardInterrupt

    program.before_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[1:], greedy(12))
    program.before_call = None
    engine.batcher.check()
    assert engine.block_manager.num_used_blocks == 0, "the other one queues again"
    assert run_all(engine)[name].outputs[0].token_ids == expected[0]
    assert_idle(engine)

    program.before_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(engine.stream(PROMPTS[1], greedy(12)))
    assert_idle(engine)
    name = engine.submit(PROMPTS[1], greedy(12))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    program.before_call = None
    assert engine.has_unfinished()
    assert run_all(engine)[name].outputs[0].token_ids == expected[1], "submit outlives an interrupted step"
    assert_idle(engine)


def test_a_stream_collected_within_a_step_waits_for_its_end(expected: list[list[int]]) -> None:
    program = ToyProgram()
    engine = make_engine(program)
    held: list[Iterator[Any]] = [engine.stream(PROMPTS[1], greedy(12))]
    next(held[0])
    name = engine.submit(PROMPTS[0], greedy(12))
    program.before_call = lambda ids: held.clear()
    engine.step()
    assert engine.batcher.num_running == 1
    engine.batcher.check()
    assert run_all(engine)[name].outputs[0].token_ids == expected[0]
    assert_idle(engine)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], r"=\[\] is empty; give at least one token id"),
    ("", "='' has no tokens after tokenizing"),
    ("a\ud800b", r"\[1\]='\\ud800' is half of a surrogate pair"),
    ([1, 97], r"\[1\]=97 is outside the vocabulary \[0, 97\)"),
    ([1, -1], r"\[1\]=-1 is outside the vocabulary"),
    ([1, True], r"\[1\]=True is not a token id"),
    ([1, 2.0], r"\[1\]=2.0 is not a token id"),
    (["a"], r"\[0\]='a' is not a token id"),
    (torch.tensor([1.0]), " has dtype torch.float32; give token ids as integers"),
    (torch.tensor([True]), " has dtype bool"),
    (torch.tensor([[1, 2]]), r" has shape \[1, 2\]"),
    (None, "=None is not a prompt"),
    (7, "=7 is not a prompt"),
    (b"ab", "=b'ab' is not a prompt"),
    ([1] * 128, " has 128 tokens, which leaves no room .* max_model_len=128; shorten it or use a model"),
    ("text", ".* is text; pass token ids, or give the engine a tokenizer"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_PROMPTS)
def test_bad_prompts_are_refused_before_anything_runs(bad: Any, message: str) -> None:
    program = ToyProgram()
    engine = make_engine(program, tokenizer=None if bad == "text" else BYTES)
    for call in (lambda: engine.submit(bad), lambda: engine.stream(bad)):
        with pytest.raises(ValueError, match="^prompt" + message) as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^prompts\[1\]" + message):
        engine.generate([[1], bad, [2]])
    assert not program.steps
    assert_idle(engine)


def test_bad_parameters_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        engine.generate([[1], [2]], [greedy()])
    with pytest.raises(ValueError, match=r"sampling_params\[1\]={'n': 1} is not SamplingParams"):
        engine.generate([[1], [2]], [greedy(), {"n": 1}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"sampling_params.stop=\['a'\] needs a tokenizer"):
        engine.submit([1], greedy(stop="a"))
    with pytest.raises(ValueError, match="prompts=None is not a prompt"):
        engine.generate(None)  # type: ignore[arg-type]
    assert_idle(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0 is not an integer >= 1"),
        ({"num_blocks": 1.5}, "num_blocks=1.5"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"max_model_len": 129}, "max_model_len=129 exceeds the model's 128"),
        ({"num_blocks": 4, "max_model_len": 17}, "max_model_len=17 exceeds the 16 tokens of the KV cache"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(**options)


def test_a_small_cache_limits_prompts_by_default() -> None:
    engine = make_engine(num_blocks=4)
    assert engine.max_model_len == 16
    with pytest.raises(ValueError, match="max_model_len=16; shorten it or give the KV cache more memory"):
        engine.submit([1] * 16)
    assert Engine(ToyProgram(), block_size=16, max_num_seqs=3).block_manager.num_blocks == 3 * 8


def test_random_operations_never_corrupt_anything(expected: list[list[int]]) -> None:
    program = ToyProgram()
    engine = make_engine(program, num_blocks=14, block_size=3, max_num_seqs=3, max_num_batched_tokens=7)
    rng = random.Random(0)

    def interrupt(ids: torch.Tensor) -> None:
        if rng.random() < 0.1:
            raise KeyboardInterrupt

    program.before_call = interrupt
    asked: dict[str, int] = {}
    cancelled: set[str] = set()
    streams: list[tuple[int, list[int], Iterator[Any]]] = []
    outputs: dict[str, RequestOutput] = {}

    def operate() -> None:
        choice = rng.randrange(12)
        which = rng.randrange(len(PROMPTS))
        if choice == 0:
            asked[engine.submit(PROMPTS[which], greedy(12))] = which
        elif choice == 1:
            streams.append((which, [], engine.stream(PROMPTS[which], greedy(12))))
        elif choice == 2 and asked:
            name = rng.choice(list(asked))
            if engine.cancel(name):
                cancelled.add(name)
        elif choice == 3 and streams:
            streams.pop(rng.randrange(len(streams)))
        elif choice == 4:
            assert tokens(engine.generate([PROMPTS[which]], greedy(3))) == [expected[which][:3]]
        elif choice < 8 and streams:
            place = rng.randrange(len(streams))
            which, got, stream = streams[place]
            try:
                got += next(stream).token_ids
            except StopIteration:
                assert got == expected[which]
                streams.pop(place)
            except KeyboardInterrupt:
                streams.pop(place)
                raise
        else:
            for output in engine.step():
                if output.finished:
                    assert output.request_id not in outputs
                    outputs[output.request_id] = output

    for _ in range(400):
        try:
            operate()
            engine.batcher.check()
        except KeyboardInterrupt:
            pass
    program.before_call = None
    streams.clear()
    outputs |= run_all(engine)
    assert outputs.keys() == asked.keys()
    for name, which in asked.items():
        got = outputs[name].outputs[0]
        assert got.token_ids == expected[which][: len(got.token_ids)]
        assert (got.finish_reason == "cancelled") == (name in cancelled)
    assert engine.stats()["preemptions"] > 0
    assert_idle(engine)
