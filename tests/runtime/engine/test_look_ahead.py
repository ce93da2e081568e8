"""One step ahead of a device with a queue: tokens, ends and books as where each step is settled first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from queued_device import QueuedProgram
from structured_engine import BigramProgram, structured_engine
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.batching import Batcher, snapshots
from torch_pagoda.runtime.blocks import BlockManager, chain_start, extend_chain
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.engine.look_ahead import LaunchedStep, LookAhead
from torch_pagoda.runtime.engine.step_runner import StepRunner
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.sampling import sampler
from torch_pagoda.runtime.sampling.sampler import Sampler

from toy_program import ToyProgram

PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [59, 60], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], list(range(20, 41))]
TIGHT: dict[str, Any] = {"num_blocks": 13, "block_size": 3, "max_num_batched_tokens": 9}
SWAPPING: dict[str, Any] = {**TIGHT, "preemption": "swap", "swap_space": 1 << 16}
SIZES = [pytest.param({}, id="ample"), pytest.param(TIGHT, id="tight"), pytest.param(SWAPPING, id="swap")]
DRAWN = [
    {"temperature": 0},
    {"seed": 3},
    {"seed": 4, "top_k": 5},
    {"seed": 5, "top_p": 0.8, "temperature": 1.5},
    {"seed": 6, "min_p": 0.1, "top_k": 9, "top_p": 0.9},
    {"seed": 7, "temperature": 0.7},
]


def make_engine(program: Any = None, *, ahead: bool = True, **options: Any) -> Engine:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **options}
    program = ToyProgram() if program is None else program
    if ahead:
        return Engine(QueuedProgram(program), async_scheduling=True, **settings)  # type: ignore[arg-type]
    return Engine(program, async_scheduling=False, **settings)


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def seen(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.error) for c in output.outputs] for output in outputs
    ]


def assert_idle(engine: Engine) -> None:
    engine.batcher.check()
    assert engine.block_manager.num_used_blocks == 0 and not engine.block_manager.held
    assert not engine.has_unfinished() and not engine._core.state.completions and not engine._core.state.submissions
    assert engine.runner._requests == [None] * engine.runner.max_num_seqs


def audited(engine: Engine) -> Iterator[None]:
    """Step to the end; after each call the books are right, and nothing that a launched step uses is given away."""
    steps = engine._core.steps
    assert isinstance(steps, LookAhead)
    for _ in range(500):
        if not engine.has_unfinished():
            return
        engine.step()
        engine.batcher.check()
        step = steps._launched
        used = [] if step is None else USED[step]
        assert all(engine.block_manager.pools[g].is_held(block) for g, block in used), "freed while a step uses it"
        for completion in steps.state.completions.values():
            request, hashes = completion.request, list[bytes]()
            extend_chain(
                hashes, request.tokens(0, request.num_tokens), 0, engine.block_manager.block_size, chain_start("")
            )
            assert request.block_hashes == hashes[: len(request.block_hashes)], "hashed before it was known"
        yield
    raise AssertionError("no end in sight")


USED: dict[LaunchedStep, list[tuple[int, int]]] = {}


@pytest.fixture(autouse=True)
def note_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note which blocks each launched step uses."""
    USED.clear()
    monkeypatch.setattr(snapshots, "WORTH", 8)
    note = LookAhead._note_launched

    def noted(self: LookAhead, step: LaunchedStep) -> None:
        note(self, step)
        blocks = self.state.batcher.block_manager
        USED[step] = [
            (g, block)
            for item in step.scheduled
            for g, table in enumerate(blocks.tables(item.request.request_id))
            for block in table
            if block >= 0
        ]

    monkeypatch.setattr(LookAhead, "_note_launched", noted)


@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_are_those_of_synchronous_steps(sizes: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=12, **drawn) for drawn in DRAWN]
    plain, ahead = make_engine(ahead=False, **sizes), make_engine(**sizes)
    for _ in range(2):  # the second time prefixes are cached
        assert seen(ahead.generate(PROMPTS, params)) == seen(plain.generate(PROMPTS, params))
        assert_idle(ahead)
    stats = ahead.stats()
    assert stats["steps_ahead"] > 10
    for name in ("cached_tokens", "computed_tokens", "generated_tokens") if not sizes else ():
        assert stats[name] == plain.stats()[name]
    if sizes:
        assert stats["preemptions"] > 0 and stats["synchronous_steps_few_blocks"] > 0
        assert (stats["swaps"] > 0) == ("swap_space" in sizes)


def test_the_same_rows_give_the_same_bits() -> None:
    """Steps are made of the same sequences where no stop is noticed late: logits differ in no bit."""
    logits: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for ahead in (False, True):
        program = ToyProgram()

        def note(x: torch.Tensor, asked: torch.Tensor, ahead: bool = ahead) -> torch.Tensor:
            logits[ahead].append(x.clone())
            return x

        program.change_logits = note
        make_engine(program, ahead=ahead).generate(PROMPTS, greedy())
    assert len(logits[False]) == len(logits[True]) > 10
    assert all(torch.equal(a, b) for a, b in zip(logits[False], logits[True], strict=True))


def test_a_synchronous_engine_reads_the_queue_too_early() -> None:
    """The imitated device notices what a real one would make wait."""
    outputs = Engine(QueuedProgram(ToyProgram(), 0.01), num_blocks=64).generate(PROMPTS, greedy())  # type: ignore[arg-type]
    assert all("TooEarly" in (output.outputs[0].error or "") for output in outputs)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_length_limits_are_not_overrun(max_tokens: int) -> None:
    counts = {}
    for ahead in (False, True):
        program = ToyProgram(max_model_len=29)
        engine = make_engine(program, ahead=ahead)
        outputs = engine.generate(PROMPTS, greedy(max_tokens))
        assert [len(o.outputs[0].token_ids) for o in outputs] == [min(max_tokens, 29 - len(p)) for p in PROMPTS]
        counts[ahead] = program.steps
    assert counts[True] == counts[False]


def stopping(engine: Engine) -> list[RequestOutput]:
    """Sequences that stop at different moments, by a token that the model gives."""
    expected = [ToyProgram().dense_greedy(prompt, 12) for prompt in PROMPTS]
    params = [greedy(30, stop_token_ids=[tokens[3 + i]]) for i, tokens in enumerate(expected)]
    names = [engine.submit(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    finished: dict[str, RequestOutput] = {}
    step = engine.step

    def noted() -> list[RequestOutput]:
        outputs = step()
        finished.update({output.request_id: output for output in outputs if output.finished})
        return outputs

    engine.step = noted  # type: ignore[method-assign]
    for _ in audited(engine) if isinstance(engine._core.steps, LookAhead) else iter(engine.has_unfinished, False):
        if not isinstance(engine._core.steps, LookAhead):
            engine.step()
    return [finished[name] for name in names] + engine.generate(PROMPTS, params)


def test_stops_are_noticed_late_and_nobody_sees_it() -> None:
    plain, ahead = make_engine(ahead=False), make_engine()
    want, found = stopping(plain), stopping(ahead)
    assert seen(found) == seen(want)
    assert all(output.outputs[0].finish_reason == "stop" for output in found)
    assert ahead.stats()["generated_tokens"] == plain.stats()["generated_tokens"]
    assert ahead.stats()["computed_tokens"] > plain.stats()["computed_tokens"]
    assert [o.metrics.num_generated_tokens for o in found] == [o.metrics.num_generated_tokens for o in want]
    assert_idle(ahead)


def leak_the_extra_token(patch: pytest.MonkeyPatch) -> None:
    update = StepRunner.update

    def leaking(self: StepRunner, scheduled: Any, outputs: Any, progressed: Any, **how: Any) -> None:
        pairs = [(item.request, output) for item, output in zip(scheduled, outputs, strict=True)]
        ended = [(request, output) for request, output in pairs if request.is_finished and output.tokens]
        update(self, scheduled, outputs, progressed, **how)
        for request, output in ended:
            request.output_token_ids.append(output.tokens[0][0].token_id)

    patch.setattr(StepRunner, "update", leaking)


def free_blocks_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "hold", lambda self, request_id: None)


def hash_what_is_not_known(patch: pytest.MonkeyPatch) -> None:
    def commit(self: Batcher, request: Request, computed: int) -> None:
        hashes = request.block_hashes
        known = [*request.tokens(0, request.num_tokens), 0]
        extend_chain(hashes, known[len(hashes) * 4 : computed], len(hashes) * 4, 4, chain_start(""))
        self.block_manager.commit(request.request_id, hashes, computed)

    patch.setattr(Batcher, "_commit", commit)


def gather_another_row(patch: pytest.MonkeyPatch) -> None:
    note = LookAhead._note_launched

    def rotated(self: LookAhead, step: LaunchedStep) -> None:
        note(self, step)
        step.sampled = step.sampled.roll(1)

    patch.setattr(LookAhead, "_note_launched", rotated)


@pytest.mark.parametrize(
    "mutant", [leak_the_extra_token, free_blocks_at_once, hash_what_is_not_known, gather_another_row]
)
def test_the_checks_find_mistakes(mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    want = stopping(make_engine(ahead=False))
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises((AssertionError, ValueError, RuntimeError)):
            assert seen(stopping(make_engine())) == seen(want)


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 17, "max_num_batched_tokens": 16}])
def test_states_and_snapshots(with_kv: bool, sizes: dict[str, Any]) -> None:
    prompts = [[*range(30, 50), 1], [*range(30, 50), 2, 3], [5, 6, 7], [*range(30, 39), 4], list(range(25, 50)), [8]]
    program = ToyStateProgram(with_kv=with_kv)
    engine = make_engine(program, max_model_len=60, **sizes)
    for _ in range(2):
        outputs = engine.generate(prompts, greedy())
        assert [o.outputs[0].token_ids for o in outputs] == [program.dense_greedy(p, 12) for p in prompts]
        assert program.mistakes == []
        assert_idle(engine)
    turns = [[*p, *o.outputs[0].token_ids, 3] for p, o in zip(prompts, outputs, strict=True)]
    chat = engine.generate(turns, greedy())
    assert [o.outputs[0].token_ids for o in chat] == [program.dense_greedy(t, 12) for t in turns]
    assert sizes or all(len(t) - o.num_cached_tokens <= 12 for t, o in zip(turns, chat, strict=True))
    assert program.mistakes == [] and engine.stats()["steps_ahead"] > 10


def test_windows() -> None:
    for sizes in ({}, TIGHT):
        plain = make_engine(ToyProgram(windows=(0, 6)), ahead=False, **sizes)
        ahead = make_engine(ToyProgram(windows=(0, 6)), **sizes)
        assert seen(ahead.generate(PROMPTS, greedy(30))) == seen(plain.generate(PROMPTS, greedy(30)))
        assert_idle(ahead)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("parallel_sampling", {"n": 2, "seed": 1}),
        ("logprobs", {"logprobs": 1, "temperature": 0}),
        ("prompt_logprobs", {"prompt_logprobs": 0, "temperature": 0}),
        ("logits_processors", {"presence_penalty": 1.0, "seed": 2}),
        ("logits_processors", {"bad_words": ["a"], "seed": 2}),
        ("logits_processors", {"min_tokens": 3, "seed": 2}),
        ("structured_outputs", {"structured_outputs": {"regex": "[a-c]{3,9}"}, "seed": 2}),
    ],
)
def test_who_needs_the_hosts_word_is_settled_first_and_counted(reason: str, options: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=9, **(options if i % 2 else {"seed": 9})) for i in range(4)]
    prompts = ["some", "words", "to", "begin"]
    plain = structured_engine()
    program = QueuedProgram(BigramProgram(vocab_size=258, max_model_len=1000))
    ahead = structured_engine(program, async_scheduling=True)  # type: ignore[arg-type]
    assert seen(ahead.generate(prompts, params)) == seen(plain.generate(prompts, params))
    stats = ahead.stats()
    counted = {name for name, count in stats.items() if name.startswith("synchronous_steps_") and count}
    assert counted == {f"synchronous_steps_{reason}"}
    assert (stats["steps_ahead"] > 0) == (reason in ("parallel_sampling", "prompt_logprobs", "structured_outputs"))


def test_beams() -> None:
    params = BeamSearchParams(3, 8)
    plain, ahead = make_engine(ahead=False), make_engine()
    want, found = plain.beam_search(PROMPTS, params), ahead.beam_search(PROMPTS, params)
    assert [[s.token_ids for s in o.sequences] for o in found] == [[s.token_ids for s in o.sequences] for o in want]
    assert ahead.stats()["synchronous_steps_beam_search"] > 0
    assert_idle(ahead)


def test_keys_that_change_with_the_length() -> None:
    """At ``restart_length`` a sequence is computed anew, which no step may run ahead of."""
    outputs = []
    for ahead in (False, True):
        program = ToyProgram()
        program.restart_length = 15
        engine = make_engine(program, ahead=ahead)
        outputs.append(seen(engine.generate(PROMPTS, greedy(20))))
        assert not ahead or engine.stats()["synchronous_steps_restart_length"] > 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", [ToyProgram, ToyStateProgram])
def test_draws_beyond_the_candidates_are_made_again(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_FIRST_CANDIDATES", 4)
    params = [SamplingParams(seed=i, top_p=0.95, temperature=2.0, max_tokens=9) for i in range(len(PROMPTS))]
    plain, ahead = make_engine(kind(), ahead=False), make_engine(kind())
    assert seen(ahead.generate(PROMPTS, params)) == seen(plain.generate(PROMPTS, params))
    assert ahead.stats()["synchronous_steps_top_p_candidates"] > 0
    assert_idle(ahead)


def test_cancels_deadlines_and_names_that_come_back() -> None:
    engine = make_engine(max_num_seqs=4)
    expected = [ToyProgram().dense_greedy(prompt, 12) for prompt in PROMPTS]
    for i, prompt in enumerate(PROMPTS):
        engine.submit(prompt, greedy(), f"r{i}", deadline=1e-9 if i == 3 else None)
    for _ in range(3):
        engine.step()
    assert engine._core.steps.is_under_way and engine.cancel("r0") and engine.cancel("r5")
    assert engine.block_manager.held, "the launched step still writes to them"
    engine.batcher.check()
    last = {output.request_id: output for output in engine.step() if output.finished}
    assert seen([last["r0"]])[0][0][0] == expected[0][:3]
    engine.submit(PROMPTS[1], greedy(), "r0")
    for _ in audited(engine):
        pass
    assert_idle(engine)
    engine.submit(PROMPTS[0], greedy(), "again")
    engine.step()
    engine.cancel("again")
    engine.submit(PROMPTS[1], greedy(), "again2")
    assert engine.reset_prefix_cache() is None and engine.defragment() >= 0 and not engine._core.steps.is_under_way
    assert engine.in_turn(lambda: engine._core.steps.is_under_way) is False
    engine.step()
    assert {o.request_id for o in engine.shutdown()} >= {"again2"}


@pytest.mark.parametrize("kind", [ToyProgram, ToyStateProgram])
@pytest.mark.parametrize("queued", [True, False])
def test_only_who_makes_steps_fail_ends_by_it(kind: Any, queued: bool) -> None:
    """On the device, where it shows a step late, and in the call itself."""
    program = kind()
    expected = [program.dense_greedy(prompt, 12) for prompt in PROMPTS]
    sets = [{*prompt, *tokens[:-1]} for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    found = [(i, t) for i, own in enumerate(expected) for t in own[2:9] if sum(t in s for s in sets) == 1]
    culprit, poison = found[0]

    def fail(ids: torch.Tensor) -> None:
        if poison in ids.tolist():
            raise RuntimeError("poison")

    program.before_call = fail
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "async_scheduling": True}
    engine = Engine(QueuedProgram(program) if queued else program, **options)  # type: ignore[arg-type]
    outputs = engine.generate(PROMPTS, greedy())
    for i, (output, own) in enumerate(zip(outputs, expected, strict=True)):
        completion = output.outputs[0]
        assert completion.finish_reason == ("error" if i == culprit else "length")
        assert completion.token_ids == (own[: own.index(poison) + 1] if i == culprit else own)
    assert_idle(engine)


def test_a_prefix_that_a_failed_step_was_to_compute_is_not_read() -> None:
    """The third request is admitted while the step that computes its prefix is under way, into a step that has to be
    settled at once."""
    prefix = list(range(20, 32))
    prompts = [prefix, [5, 6, 7], [*prefix, 40, 41]]
    params = [greedy(), greedy(), greedy(presence_penalty=1.0)]
    failures = [RuntimeError("once")]

    def fail(ids: torch.Tensor) -> None:
        if failures:
            raise failures.pop()

    program = ToyProgram()
    program.before_call = fail
    engine = make_engine(program, max_num_batched_tokens=15)
    outputs = seen(engine.generate(prompts, params))
    assert not failures
    assert outputs == [
        seen(make_engine(ahead=False).generate([prompt], [own]))[0]
        for prompt, own in zip(prompts, params, strict=True)
    ]
    assert_idle(engine)


def test_logits_that_allow_no_choice() -> None:
    program = ToyProgram()
    expected = [program.dense_greedy(prompt, 12) for prompt in PROMPTS]

    def spoil(logits: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill((asked == expected[0][4])[:, None], torch.nan)

    plain, ahead = [make_engine(p, ahead=a) for p, a in ((ToyProgram(), False), (program, True))]
    for engine in (plain, ahead):
        engine.runner.program.change_logits = spoil  # type: ignore[attr-defined]
    program.change_logits = spoil
    assert seen(ahead.generate(PROMPTS, greedy())) == seen(plain.generate(PROMPTS, greedy()))
    assert ahead.stats()["finished_error"] >= 1
    assert_idle(ahead)


@pytest.mark.parametrize("vocab", [97, 5000])
def test_launched_draws_are_those_of_sample(vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    requests = [Request(f"r{i}", [1], SamplingParams(max_tokens=9, **drawn)) for i, drawn in enumerate(DRAWN * 5)]
    for scale in (0.5, 3.0, 30.0):
        logits = torch.randn(len(requests), vocab, generator=generator) * scale
        logits[3] = torch.nan
        logits[4, 0] = torch.inf
        copy = logits.clone()
        want = Sampler().sample(logits, requests)
        tokens, usable, certain = Sampler().launch(logits, requests, lambda tensor: tensor).tolist()
        assert torch.equal(logits.nan_to_num(1.0, 2.0), copy.nan_to_num(1.0, 2.0))
        assert [i for i, ok in enumerate(usable) if not ok] == want.failed == [3, 4]
        known = [i for i, sure in enumerate(certain) if sure and usable[i]]
        assert [tokens[i] for i in known] == [want.token_ids[i] for i in known]
        assert len(known) >= len(requests) - 2 - (10 if vocab > 256 else 0)


def test_the_option() -> None:
    assert type(make_engine(ahead=False)._core.steps) is StepRunner
    assert type(Engine(ToyProgram(), num_blocks=8)._core.steps) is StepRunner, "never by default on a CPU"
    assert "steps_ahead" not in Engine(ToyProgram(), num_blocks=8).stats()
    with pytest.raises(ValueError, match="async_scheduling='yes'"):
        Engine(ToyProgram(), num_blocks=8, async_scheduling="yes")
