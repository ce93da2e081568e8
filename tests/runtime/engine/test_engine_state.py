"""Models with state: whatever happens to slots and blocks, the tokens are those of an unbatched run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.batching import POLICIES, snapshots
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block, bytes_per_slot
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.sampling.beam_search import BeamSearch
from torch_pagoda.runtime.sampling.logprobs import top_logprobs

KINDS = [pytest.param(True, id="hybrid"), pytest.param(False, id="only state")]
SHARED = list(range(30, 50))
PROMPTS = [[*SHARED, 1], [*SHARED, 2, 3], [5, 6, 7], [*SHARED[:9], 4], list(range(25, 50)), [*SHARED, 1], [8]]
SLOT = bytes_per_slot(ToyStateProgram().caches)
BLOCK = bytes_per_block(ToyStateProgram().caches, 4)


@pytest.fixture(autouse=True)
def small_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are short here."""
    monkeypatch.setattr(snapshots, "WORTH", 8)


def make_engine(program: ToyStateProgram, **options: Any) -> Engine:
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_model_len": 60, **options}
    if "kv_cache_memory" in options:
        del settings["num_blocks"]
    return Engine(program, **settings)


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def expected(program: ToyStateProgram, max_tokens: int = 12) -> list[list[int]]:
    return [program.dense_greedy(prompt, max_tokens) for prompt in PROMPTS]


def assert_idle(engine: Engine, program: ToyStateProgram) -> None:
    assert program.mistakes == []
    engine.batcher.check()
    engine.block_manager.finish_copies()
    stats = engine.stats()
    assert stats["blocks_used"] == stats["host_blocks_used"] == stats["queue_length"] == stats["running"] == 0
    assert stats["state_slots_used"] == 0
    assert stats["state_slots_free"] + stats["state_slots_cached"] == stats["state_slots_total"]


@pytest.mark.parametrize("with_kv", KINDS)
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_prompts_in_chunks_beside_decodes(with_kv: bool, budget: int) -> None:
    program = ToyStateProgram(with_kv=with_kv)
    engine = make_engine(program, max_num_batched_tokens=budget)
    for _ in range(2):
        assert tokens(engine.generate(PROMPTS, greedy())) == expected(program)
        assert_idle(engine, program)


@pytest.mark.parametrize("with_kv", KINDS)
def test_later_prompts_go_on_from_snapshots(with_kv: bool) -> None:
    program = ToyStateProgram(with_kv=with_kv)
    engine = make_engine(program)
    assert tokens(engine.generate(PROMPTS, greedy())) == expected(program)
    before = engine.stats()["cached_tokens"]
    outputs = engine.generate(PROMPTS, greedy())
    assert tokens(outputs) == expected(program)
    # A prompt's last token is computed, and of the others what fills no block; [5, 6, 7] and [8] have no block.
    assert [output.num_cached_tokens for output in outputs] == [20, 20, 0, 8, 24, 20, 0]
    assert engine.stats()["cached_tokens"] - before == 92
    turns = [[*prompt, *own, 3] for prompt, own in zip(PROMPTS, tokens(outputs), strict=True)]
    chat = engine.generate(turns, greedy())
    assert tokens(chat) == [program.dense_greedy(turn, 12) for turn in turns]
    assert all(len(turn) - output.num_cached_tokens <= 12 for turn, output in zip(turns, chat, strict=True))
    assert_idle(engine, program)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("scarce", ["blocks", "slots"])
def test_preemption_changes_no_token(preemption: str, scarce: str, caching: bool) -> None:
    program = ToyStateProgram(width=2 if scarce == "blocks" else 150)
    slot = bytes_per_slot(program.caches)
    sizes: dict[str, Any] = {"num_blocks": 17} if scarce == "blocks" else {"kv_cache_memory": 6 * slot}
    engine = make_engine(
        program,
        max_num_batched_tokens=16,
        preemption=preemption,
        swap_space=1 << 14,
        policy="priority",
        **sizes,
        enable_prefix_caching=caching,
    )
    if scarce == "slots":
        assert engine.stats()["state_slots_total"] == 3
    ids = [engine.submit(prompt, greedy(), priority=-i) for i, prompt in enumerate(PROMPTS)]
    found: dict[str, list[int]] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        engine.batcher.check()
    assert [found[name] for name in ids] == expected(program)
    if scarce == "blocks":
        assert engine.stats()["preemptions"] > 0 and (engine.stats()["swaps"] > 0) == (preemption == "swap")
    assert_idle(engine, program)


@pytest.mark.parametrize("with_kv", KINDS)
def test_several_completions_go_on_from_one_prompts_state(with_kv: bool) -> None:
    program = ToyStateProgram(with_kv=with_kv)
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=9, logprobs=0)
    engine = make_engine(program, max_num_batched_tokens=16)
    together = engine.generate(PROMPTS, params)
    assert program.num_shared > 0
    for prompt, output in zip(PROMPTS, together, strict=True):
        assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1
        for completion in output.outputs:
            logits = program.dense_logits([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1)
            assert completion.logprobs is not None
            for row, token, known in zip(logprobs, completion.token_ids, completion.logprobs, strict=True):
                assert known[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
    assert_idle(engine, program)


@pytest.mark.parametrize("with_kv", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_blocks": 24}, {"max_num_seqs": 3}])
def test_beams_branch_without_copies(with_kv: bool, options: dict[str, Any]) -> None:
    program = ToyStateProgram(with_kv=with_kv)
    params = BeamSearchParams(3, 8)
    engine = make_engine(program, **options)
    found = engine.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, found, strict=True):
        search = BeamSearch(params, ())
        while not search.is_done:
            logits = torch.stack([program.dense_logits([*prompt, *beam.token_ids])[-1] for beam in search.beams])
            search.advance(*top_logprobs(logits, search.num_candidates))
        assert output.error is None
        assert [s.token_ids for s in output.sequences] == [list(h.token_ids) for h in search.hypotheses]
    assert_idle(engine, program)


def test_a_step_that_failed_halfway_is_not_applied_twice() -> None:
    """All requests of the step come to their right end: their states were written, in part, and are made anew."""
    program = ToyStateProgram()
    engine = make_engine(program, max_num_batched_tokens=32)
    fails = iter([False] * 6 + [True] + [False] * 3 + [True] + [False] * 10_000)

    def halfway(ids: torch.Tensor) -> None:
        if len(program.steps) > 1 and program.steps[-1][1] > 1 and next(fails):
            raise RuntimeError("halfway")

    program.halfway = halfway
    assert tokens(engine.generate(PROMPTS, greedy())) == expected(program)
    assert next(fails) is False and engine.stats()["failed"] == 0
    assert_idle(engine, program)


@pytest.mark.parametrize("with_kv", KINDS)
@pytest.mark.parametrize(("budget", "culprit"), [(10, 4), (64, 2)])
def test_only_who_makes_steps_fail_ends_by_it(with_kv: bool, budget: int, culprit: int) -> None:
    """Also where it takes several chunks to compute the culprit anew, so that its step goes on from a state again."""
    program = ToyStateProgram(with_kv=with_kv)
    seen = [{*prompt, *program.dense_greedy(prompt, 11)} for prompt in PROMPTS]
    own = program.dense_greedy(PROMPTS[culprit], 11)[3:]
    poison = min(
        [token for token in own if token not in PROMPTS[culprit]],
        key=lambda token: sum(token in some for some in seen),
    )
    safe = [i for i, some in enumerate(seen) if poison not in some]
    assert culprit not in safe and len(safe) >= 3

    def before_call(ids: torch.Tensor) -> None:
        if poison in ids.tolist():
            program.halfway = fail
        else:
            program.halfway = None

    def fail(ids: torch.Tensor) -> None:
        raise RuntimeError("poison")

    program.before_call = before_call
    engine = make_engine(program, max_num_batched_tokens=budget, enable_prefix_caching=False)
    ids = engine.submit_many(PROMPTS, greedy(), final_only=True)
    found: dict[str, RequestOutput] = {}
    for _ in range(1500):
        found |= {output.request_id: output for output in engine.step()}
    assert not engine.has_unfinished(), "steps fail for ever"
    outputs = [found[name] for name in ids]
    for i, (output, wanted) in enumerate(zip(outputs, expected(program), strict=True)):
        if i in safe:
            assert output.outputs[0].token_ids == wanted
    assert outputs[culprit].outputs[0].finish_reason == "error"
    assert_idle(engine, program)


def test_an_interrupted_step_is_made_anew() -> None:
    program = ToyStateProgram()
    engine = make_engine(program)
    ids = [engine.submit(prompt, greedy()) for prompt in PROMPTS]
    found: dict[str, list[int]] = {}
    count = 0

    def halfway(tokens: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count % 9 == 8:  # often, and seldom enough for those that have to compute their prompts again
            raise KeyboardInterrupt

    program.halfway = halfway
    interrupts = 0
    while engine.has_unfinished():
        try:
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts >= 2 and [found[name] for name in ids] == expected(program)
    assert_idle(engine, program)


@pytest.mark.parametrize("length", [21, 24, 30])
def test_a_sequence_that_outgrows_the_short_keys_begins_from_zeros(length: int) -> None:
    program = ToyStateProgram()
    program.restart_length = length
    engine = make_engine(program)
    assert tokens(engine.generate(PROMPTS, greedy())) == expected(program)
    assert_idle(engine, program)


@pytest.mark.parametrize("with_kv", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_random_load_changes_no_token(with_kv: bool, seed: int) -> None:
    """Cancels, moves, growth and shrinking, preemption, several completions, failing and interrupted steps."""
    rng = random.Random(seed)
    program = ToyStateProgram(with_kv=with_kv)
    engine = make_engine(
        program,
        num_blocks=rng.choice([16, 20, 40]),
        max_num_seqs=rng.choice([3, 8]),
        min_kv_cache_memory=rng.choice([None, 2 * (BLOCK + SLOT) if with_kv else 3 * SLOT]),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        preemption=rng.choice(["recompute", "swap", "auto"]),
        policy=rng.choice(list(POLICIES)),
        enable_prefix_caching=rng.random() < 0.8,
        swap_space=rng.choice([BLOCK + SLOT, 1 << 14]),
    )
    for pool in engine.block_manager.pools:
        if hasattr(pool, "patience"):
            pool.patience = 2

    def halfway(ids: torch.Tensor) -> None:
        chance = rng.random()
        if chance < 0.02:
            raise KeyboardInterrupt
        if chance < 0.05 and program.steps[-1][1] > 1:
            raise RuntimeError("halfway")

    program.halfway = halfway
    own = expected(program)
    wanted: dict[str, list[int]] = {}
    outputs: dict[str, RequestOutput] = {}
    cancelled = set()

    def step() -> None:
        try:
            outputs.update({output.request_id: output for output in engine.step()})
        except KeyboardInterrupt:
            return
        engine.batcher.check()

    for _ in range(40):
        i = rng.randrange(len(PROMPTS))
        options = {"priority": rng.randrange(-2, 3), "client": rng.choice("ab")}
        wanted[engine.submit(PROMPTS[i], greedy(n=rng.choice([1, 1, 2])), **options)] = own[i]
        for _ in range(rng.randrange(4)):
            step()
        if rng.random() < 0.3:
            engine.defragment()
        if rng.random() < 0.05:
            engine.reset_prefix_cache()
        if rng.random() < 0.2:
            name = rng.choice(list(wanted))
            if engine.cancel(name):
                cancelled.add(name)
    while engine.has_unfinished():
        step()
    for name, tokens_of in wanted.items():
        for completion in outputs[name].outputs:
            given = completion.token_ids
            assert given == tokens_of if name not in cancelled else given == tokens_of[: len(given)]
            assert completion.finish_reason == "length" or name in cancelled
    assert_idle(engine, program)
