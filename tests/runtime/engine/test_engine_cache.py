"""Whatever the cache goes through, the tokens are those of an unbatched run: sharing, preemption, moves, growth."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torch_pagoda.runtime.batching import POLICIES, QueueFull
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram

SHARED = list(range(30, 50))
PROMPTS = [[*SHARED, 1], [*SHARED, 2, 3], [5, 6, 7], [*SHARED[:9], 4], list(range(60, 85)), [*SHARED, 1], [8]]
WINDOWS = {"full": (0, 0), "window": (9, 9), "hybrid": (9, 0)}
SWAP = 1 << 20
BLOCK = bytes_per_block(ToyProgram().caches, 4)


def make_engine(windows: str = "full", program: ToyProgram | None = None, **options: Any) -> Engine:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_model_len": 60, **options}
    return Engine(program or ToyProgram(windows=WINDOWS[windows]), **settings)


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_idle(engine: Engine) -> None:
    engine.batcher.check()
    engine.block_manager.finish_copies()
    stats = engine.stats()
    assert stats["blocks_used"] == stats["host_blocks_used"] == stats["queue_length"] == stats["running"] == 0
    assert stats["blocks_cached"] + stats["blocks_free"] == stats["blocks_total"]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return {
        name: [ToyProgram(windows=windows).dense_greedy(prompt, 12) for prompt in PROMPTS]
        for name, windows in WINDOWS.items()
    }


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_scarce_blocks_change_no_token(
    windows: str, caching: bool, preemption: str, expected: dict[str, list[list[int]]]
) -> None:
    engine = make_engine(
        windows,
        num_blocks=17,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
        preemption=preemption,
        swap_space=SWAP,
    )
    for _ in range(2):
        assert tokens(engine.generate(PROMPTS, greedy())) == expected[windows]
        assert_idle(engine)
    stats = engine.stats()
    if windows == "full":
        assert stats["preemptions"] > 0
        assert (stats["swaps"] > 0) == (preemption == "swap") or preemption == "auto"
    assert (stats["prefix_hit_tokens"] > 0) == caching


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_no_policy_changes_a_token(policy: str, preemption: str, expected: dict[str, list[list[int]]]) -> None:
    engine = make_engine(
        "hybrid", num_blocks=18, max_num_seqs=4, policy=policy, preemption=preemption, swap_space=SWAP
    )
    priority, client = [3, -1, 2, 0, -2, 1, 5], list("abacaba")
    assert tokens(engine.generate(PROMPTS, greedy(), priority=priority, client=client)) == expected["hybrid"]
    assert_idle(engine)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(4))
def test_random_moves_growth_and_cancels_change_no_token(
    windows: str, seed: int, expected: dict[str, list[list[int]]]
) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        windows,
        num_blocks=rng.choice([16, 20, 40]),
        min_kv_cache_memory=rng.choice([None, 4 * BLOCK, 15 * BLOCK]),
        max_num_batched_tokens=rng.choice([5, 16, 64]),
        preemption=rng.choice(["recompute", "swap", "auto"]),
        policy=rng.choice(list(POLICIES)),
        swap_space=rng.choice([4096, SWAP]),
    )
    for pool in engine.block_manager.pools:
        if hasattr(pool, "patience"):
            pool.patience = 2
    wanted: dict[str, list[int]] = {}
    outputs: dict[str, RequestOutput] = {}
    cancelled = set()
    for _ in range(40):
        i = rng.randrange(len(PROMPTS))
        name = engine.submit(PROMPTS[i], greedy(), priority=rng.randrange(-2, 3), client=rng.choice("ab"))
        wanted[name] = expected[windows][i]
        for _ in range(rng.randrange(4)):
            outputs |= {output.request_id: output for output in engine.step()}
            engine.batcher.check()
        if rng.random() < 0.3:
            engine.defragment()
        if rng.random() < 0.2:
            name = rng.choice(list(wanted))
            if engine.cancel(name):
                cancelled.add(name)
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        if rng.random() < 0.3:
            engine.defragment()
        engine.batcher.check()
    for name, tokens_wanted in wanted.items():
        found = outputs[name].outputs[0].token_ids
        assert found == tokens_wanted[: len(found)]
        assert len(found) == 12 or name in cancelled
    assert_idle(engine)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("num_blocks", [64, 22])
def test_parallel_samples_share_the_prompt_and_are_what_they_are_alone(windows: str, num_blocks: int) -> None:
    prompt = [*SHARED, 1, 2]  # ends within a block, which each sample copies before it writes into it
    params = SamplingParams(n=4, seed=11, max_tokens=9)
    together = make_engine(windows, num_blocks=num_blocks)
    output = together.generate(prompt, params)[0]
    alone = [make_engine(windows).generate(prompt, params.completion(i))[0].outputs[0] for i in range(4)]
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    groups = len(together.block_manager.groups)
    if num_blocks == 64:
        # The prompt was computed once; three of four samples copied its last block.
        assert together.stats()["computed_tokens"] == len(prompt) + 4 * 8
        assert together.stats()["copies_on_write"] == 3 * groups
    assert_idle(together)


def test_samples_that_find_no_seat_wait() -> None:
    engine = make_engine(max_num_seqs=2)
    output = engine.generate([5, 6, 7], SamplingParams(n=5, seed=3, max_tokens=6))[0]
    alone = [make_engine().generate([5, 6, 7], SamplingParams(seed=3 + i, max_tokens=6))[0] for i in range(5)]
    assert [c.token_ids for c in output.outputs] == [o.outputs[0].token_ids for o in alone]
    assert_idle(engine)


def test_a_shared_prefix_is_computed_once_even_within_a_batch(expected: dict[str, list[list[int]]]) -> None:
    engine = make_engine()
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[5]]
    outputs = engine.generate(prompts, greedy())
    assert tokens(outputs) == [expected["full"][i] for i in (0, 1, 5)]
    assert [output.num_cached_tokens for output in outputs] == [0, 20, 20]
    again = engine.generate(prompts, greedy())
    assert tokens(again) == tokens(outputs)
    assert [output.num_cached_tokens for output in again] == [20, 20, 20]


@pytest.mark.parametrize("steps", [3, 9])
def test_the_cached_tokens_are_those_of_the_prompt_however_often_it_begins(steps: int) -> None:
    engine = make_engine()
    engine.generate([PROMPTS[0]], greedy(1))
    for name, prompt in {"new": PROMPTS[4], "known": PROMPTS[0]}.items():
        engine.submit(prompt, greedy(12), request_id=name)
    found, queries = {}, 0
    for step in range(40):
        if step == steps:
            queries = engine.block_manager.num_prefix_queries
            engine.in_turn(engine.compute_again)
        for output in engine.step():
            found[output.request_id] = (output.num_cached_tokens, len(output.outputs[0].token_ids))
    assert found == {"new": (0, 12), "known": (20, 12)}
    assert engine.block_manager.num_prefix_queries == queries
    assert_idle(engine)


def test_samples_that_wait_have_the_cached_tokens_of_their_prompt() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.submit(PROMPTS[0], SamplingParams(n=5, seed=3, max_tokens=9))
    engine.step()
    copied = {name: completion.request for name, completion in engine._core.state.completions.items()}
    while engine.has_unfinished():
        engine.step()
    assert [request.num_cached_tokens for request in copied.values()] == [0] * 5


def test_the_next_turn_finds_question_and_answer() -> None:
    engine = make_engine()
    first = engine.generate([PROMPTS[4]], greedy(12))[0]
    history = [*PROMPTS[4], *first.outputs[0].token_ids]
    second = engine.generate([[*history, 9, 9]], greedy(5))[0]
    # All but the last token of the answer were computed; full blocks of them are found.
    assert second.num_cached_tokens == (len(history) - 1) // 4 * 4
    assert second.outputs[0].token_ids == ToyProgram().dense_greedy([*history, 9, 9], 5)


def test_salts_separate_clients_and_a_reset_forgets() -> None:
    engine = make_engine()

    def cached(salt: str) -> int:
        return engine.generate([PROMPTS[0]], greedy(2), cache_salt=salt)[0].num_cached_tokens

    assert [cached("a"), cached("b"), cached("a"), cached("b")] == [0, 0, 20, 20]
    engine.reset_prefix_cache()
    assert engine.stats()["blocks_cached"] == 0
    assert cached("a") == 0


def test_a_window_keeps_long_sequences_in_few_blocks() -> None:
    engine = make_engine("window", num_blocks=8, max_model_len=None)
    assert engine.max_model_len == 128, "more than the 32 tokens that the blocks hold"
    program = ToyProgram(windows=(9, 9))
    assert tokens(engine.generate([PROMPTS[4]], greedy(90))) == [program.dense_greedy(PROMPTS[4], 90)]
    assert engine.stats()["blocks_used_peak"] <= 8
    assert_idle(engine)


def test_hybrid_layers_free_what_left_the_window() -> None:
    engine = make_engine("hybrid", num_blocks=64, enable_prefix_caching=False)
    engine.submit(PROMPTS[4], greedy(30))
    while engine.has_unfinished():
        engine.step()
        sliding, full = (pool.num_used for pool in engine.block_manager.pools)
        assert sliding <= 4 + 6, "the window, and the prompt's chunk in the first step"
        assert full <= 14
    assert engine.block_manager.pools[1].peak_used == 14


def test_the_pool_grows_with_the_load_and_gives_back() -> None:
    engine = make_engine(num_blocks=64, min_kv_cache_memory=4 * BLOCK, enable_prefix_caching=False)
    pool: Any = engine.block_manager.pools[0]
    pool.patience = 3
    sizes = []
    for prompt in PROMPTS:
        engine.submit(prompt, greedy())
    while engine.has_unfinished():
        engine.step()
        sizes.append(pool.num_blocks)
    assert max(sizes) > 30
    engine.generate([[1, 2]], greedy(55))
    assert pool.num_blocks <= 16
    assert engine.stats()["preemptions"] == 0


def test_prompts_beyond_the_queue_are_refused() -> None:
    engine = make_engine(max_queue=2, max_num_seqs=1)
    names = [engine.submit([1, 2, 3], greedy(4)) for _ in range(2)]
    with pytest.raises(QueueFull, match="1 new requests, 2 waiting, max_queue=2; retry later"):
        engine.submit([1], greedy(1))
    with pytest.raises(QueueFull, match="3 new requests, 2 waiting"):
        engine.generate([[1], [2], [3]], greedy(1))
    engine.step()
    engine.submit([4], greedy(1), request_id="third")
    finished = set()
    while engine.has_unfinished():
        finished |= {output.request_id for output in engine.step() if output.finished}
    assert finished == {*names, "third"}


def test_a_refused_prompt_never_runs_whatever_was_interrupted_before() -> None:
    program = ToyProgram()
    engine = make_engine(program=program, max_queue=2, max_num_seqs=8)
    for _ in range(4):
        engine.submit([1, 2, 3], greedy(4))
        engine.step()

    def interrupt(tokens: object) -> None:
        program.before_call = None
        raise KeyboardInterrupt

    program.before_call = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    # What ran before the interrupt waits again, and fills the queue.
    with pytest.raises(QueueFull):
        engine.submit([9], greedy(1), request_id="refused")
    finished = set()
    while engine.has_unfinished():
        finished |= {output.request_id for output in engine.step() if output.finished}
    assert "refused" not in finished and len(finished) == 3
    assert_idle(engine)


def test_a_deadline_ends_a_request_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    program = ToyProgram()
    program.before_call = lambda tokens: now.__setitem__(0, now[0] + 1)
    engine = make_engine(program=program, max_num_seqs=2, enable_prefix_caching=False)
    outputs = engine.generate(PROMPTS[:4], greedy(), deadline=[3.5, None, 2.5, 100])
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["timeout", "length", "timeout", "length"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 12, 0, 12]
    assert_idle(engine)


def test_prompt_logprobs_are_the_models() -> None:
    program = ToyProgram()
    engine = make_engine(program=program, max_num_batched_tokens=7, num_blocks=20)
    engine.generate([PROMPTS[0]], greedy(2))  # cached: scoring a prompt needs all of its logits, and computes them
    scored = engine.generate(PROMPTS, greedy(3, prompt_logprobs=2))
    for prompt, output in zip(PROMPTS, scored, strict=True):
        rows = program.dense_logits(prompt).log_softmax(-1)
        entries = output.prompt_logprobs
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        assert output.num_cached_tokens == 0
        for position, entry in enumerate(entries[1:], start=1):
            assert entry is not None
            assert entry[prompt[position]].logprob == pytest.approx(
                float(rows[position - 1, prompt[position]]), abs=1e-5
            )
            assert set(rows[position - 1].topk(2).indices.tolist()) <= entry.keys()
