"""An engine over a leader and followers, in threads: what all ranks must be told, and what ends the group."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import kinds, leading
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.cache.block_copier import BlockCopier
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.parallel.group import GroupFailed
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram

PROMPTS = [[(7 * i + 3 * j) % 61 for j in range(length)] for i, length in enumerate((4, 37, 21, 9, 30))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def attention() -> ToyProgram:
    return ToyProgram(windows=(0, 8), dtype=torch.float64)


MADE = {"attention": attention, "state": ToyStateProgram}


def tokens(engine: Engine, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    outputs = engine.generate(PROMPTS, params)
    assert not [completion.error for output in outputs for completion in output.outputs if completion.error]
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("toy", MADE)
@pytest.mark.parametrize("size, ahead", [(2, False), (2, True), (3, False)])
def test_tokens_are_those_of_one_process(toy, size, ahead):
    leader, ranks = leading(MADE[toy], size)
    found = tokens(Engine(leader, **SETTINGS, async_scheduling=ahead))
    assert found == tokens(Engine(MADE[toy](), **SETTINGS))
    assert kinds(ranks.sent)[:4] == ["count", "reserve", "bind", "host"]


@pytest.mark.parametrize("toy", MADE)
@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_are_copied_moved_and_discarded_on_all_ranks(toy, ahead):
    leader, ranks = leading(MADE[toy])
    engine = Engine(
        leader,
        **{**SETTINGS, "num_blocks": 19, "min_kv_cache_memory": 8192 if toy == "attention" else 512},
        **{"preemption": "swap", "swap_space": 1 << 20, "async_scheduling": ahead},
    )
    for pool in engine.block_manager.pools:
        if hasattr(pool, "patience"):
            pool.patience = 2
    expected = tokens(Engine(MADE[toy](), **SETTINGS))
    drawn, asked, found = random.Random(1), {}, {}
    for _ in range(30):
        i = drawn.randrange(len(PROMPTS))
        asked[engine.submit(PROMPTS[i], GREEDY, priority=drawn.randrange(-1, 2))] = expected[i]
        for _ in range(drawn.choice([0, 0, 5, 40])):
            found |= {output.request_id: output for output in engine.step()}
        if drawn.random() < 0.3:
            engine.defragment()
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    assert {name: [list(output.outputs[0].token_ids)] for name, output in found.items()} == asked
    assert engine.stats()["swaps"] > 0
    assert any("copies" in message.tensors for message in ranks.sent if message.kind == "step"), "beside a step"
    assert {"copies", "discard"} <= {*kinds(ranks.sent)}


def test_blocks_of_all_ranks_are_stored_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another rank makes its copies late."""
    make = BlockCopier._make

    def late(self: BlockCopier, copies: Any) -> None:
        if type(self) is BlockCopier:
            time.sleep(0.003)
        make(self, copies)

    monkeypatch.setattr(BlockCopier, "_make", late)

    def divided() -> ToyProgram:
        program = attention()
        program.caches = [replace(spec, head_ranks=2) for spec in program.caches]
        return program

    store = {"kv_store": f"folder://{tmp_path}/kv", "kv_store_write": "all", "kv_store_wait": 30.0}
    expected = tokens(Engine(attention(), **SETTINGS))
    for is_read in (False, True):
        engine = Engine(leading(divided)[0], **SETTINGS, **store, swap_space=1 << 20, fingerprint=b"of this test")
        assert tokens(engine) == expected
        assert engine.stats()["cached_tokens"] == is_read * sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
        engine.generate([[9] * 9], SamplingParams(temperature=0, max_tokens=1))  # stored when no step runs
        engine.shutdown()


@pytest.mark.parametrize("toy", MADE)
def test_shared_blocks_part_on_all_ranks(toy):
    """Prefixes are found again, and completions of one prompt write into blocks of their own."""
    params = SamplingParams(temperature=1, seed=5, n=3, max_tokens=9, ignore_eos=True)
    leader, ranks = leading(MADE[toy])
    engine, alone = Engine(leader, **SETTINGS), Engine(MADE[toy](), **SETTINGS)
    for _ in range(2):
        assert tokens(engine, params) == tokens(alone, params)
    assert engine.stats()["cached_tokens"] > 0
    if toy == "attention":
        assert "copies" in kinds(ranks.sent)
    beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    found, expected = (each.beam_search(PROMPTS[:2], beams) for each in (engine, alone))
    assert [[list(beam.token_ids) for beam in output.sequences] for output in found] == [
        [list(beam.token_ids) for beam in output.sequences] for output in expected
    ]


def test_counts_are_the_least_of_all_ranks():
    """Another rank's layers may take more: in host memory, too."""
    light, heavy = ToyProgram(), ToyProgram()
    heavy.caches = [replace(spec, num_kv_heads=3 * spec.num_kv_heads) for spec in heavy.caches]
    programs = iter([light, heavy])
    settings = {**SETTINGS, "num_blocks": None, "kv_cache_memory": "64KiB", "swap_space": "32KiB"}
    leader, ranks = leading(lambda: next(programs))
    found, most, least = (Engine(program, **settings).block_manager for program in (leader, light, heavy))
    assert found.pools[0].num_blocks == least.pools[0].num_blocks == most.pools[0].num_blocks // 3
    (host,) = [message.values["counts"] for message in ranks.sent if message.kind == "host"]
    assert host == [(32 << 10) // (3 * 2 * 8 * 2 * 4 * 2 * 4)]


def test_memory_that_nobody_sized_is_shared(monkeypatch):
    monkeypatch.setattr("torch_pagoda.runtime.cache.pool_plan.available_memory", lambda: 100 << 10)
    monkeypatch.setattr("torch_pagoda.runtime.cache.kv_cache.available_memory", lambda: 100 << 10)
    settings = {**SETTINGS, "num_blocks": None}
    alone, shared = Engine(ToyProgram(), **settings), Engine(leading(ToyProgram)[0], **settings)
    assert shared.block_manager.num_blocks == alone.block_manager.num_blocks // 2


def test_ranks_that_need_other_blocks_end_the_start():
    spare = iter([1, 2])

    def make() -> ToyProgram:
        program = attention()
        own = next(spare)
        program.reserve = lambda *sizes: own  # type: ignore[method-assign]
        return program

    leader, _ = leading(make)
    with pytest.raises(GroupFailed, match="number of spare blocks"):
        Engine(leader, **SETTINGS)


def test_a_rank_that_would_run_a_step_otherwise_ends_the_group():
    modes = iter(["graph of 8", "operators"])

    def make() -> ToyProgram:
        program = attention()
        mode = next(modes, "graph of 8")
        program.mode = lambda step: mode  # type: ignore[attr-defined]
        return program

    leader, ranks = leading(make)
    ranks.start_again = lambda program: False  # type: ignore[method-assign]
    engine = Engine(leader, **SETTINGS)
    (output,) = engine.generate(PROMPTS[:1], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error == "rank 1 would run 'operators', but rank 0 runs 'graph of 8'"
    with pytest.raises(RuntimeError, match="would run 'operators'"):
        engine.submit(PROMPTS[0], GREEDY)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("where", [0, 1])
def test_a_group_that_failed_starts_again_and_no_token_changes(where, ahead):
    """Nobody runs a step alone: others would wait, or do it twice."""
    leader, ranks = leading(attention)
    engine = Engine(leader, **SETTINGS, async_scheduling=ahead)
    left = [9]

    def before_call(ids: torch.Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            raise ValueError("no")

    ranks.programs[where].program.before_call = before_call
    assert tokens(engine) == tokens(Engine(attention(), **SETTINGS))
    assert ranks.num_restarts == 1 and engine.stats()["rank_restarts"] == 1
    again = kinds(ranks.sent)
    assert again[again.index("step") :].count("bind") == 1


def test_a_group_that_failed_while_nothing_ran_starts_again():
    leader, ranks = leading(attention)
    engine = Engine(leader, **SETTINGS)
    engine.notice_failure()
    assert ranks.num_restarts == 0
    ranks.failure = GroupFailed(1, "died with signal 9 after bind")
    engine.notice_failure()
    assert ranks.num_restarts == 1 and engine.device_lost is None
    assert tokens(engine) == tokens(Engine(attention(), **SETTINGS))
    ranks.num_restarts, ranks.failure = 4, GroupFailed(1, "died with signal 9 after step 7")
    engine.notice_failure()
    assert engine.device_lost == "rank 1 died with signal 9 after step 7"


def test_a_group_that_keeps_failing_ends_every_request():
    leader, ranks = leading(attention)
    engine = Engine(leader, **SETTINGS)

    def before_call(ids: torch.Tensor) -> None:
        raise ValueError("no step today")

    ranks.programs[0].program.before_call = before_call
    outputs = engine.generate(PROMPTS, GREEDY)
    assert {output.outputs[0].error for output in outputs} == {"rank 0 failed in step 4: no step today"}
    assert engine.device_lost == "rank 0 failed in step 4: no step today"


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where whatever started the tests has it ignored, as a shell does in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("ahead", [False, True])
def test_ctrl_c_is_held_back_while_ranks_compute(ahead, interruptible):
    leader, ranks = leading(attention)
    engine = Engine(leader, **SETTINGS, async_scheduling=ahead)
    left = [5]

    def before_call(ids: torch.Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            signal.raise_signal(signal.SIGINT)

    ranks.programs[0].program.before_call = before_call
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY)
    assert signal.getsignal(signal.SIGINT) is handler
    assert tokens(engine) == tokens(Engine(attention(), **SETTINGS))
    assert ranks.num_restarts == 0 and ranks.failure is None
