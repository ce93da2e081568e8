"""Snapshots of states: where they are left, what they save, what they cost, and which of them go first."""

from __future__ import annotations

import pytest

from torch_pagoda.runtime.batching import Batcher
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from simulated_engine import SimulatedEngine

SIZE = 16
SHARED = [7] * 480


def make_engine(
    slots: int = 16, blocks: int = 1000, budget: int = 2048, interval: int | None = 256, *, only_state: bool = False
) -> SimulatedEngine:
    groups = (
        [BlockGroup(slots, is_state=True)] if only_state else [BlockGroup(blocks), BlockGroup(slots, is_state=True)]
    )
    manager = BlockManager(groups, SIZE, enable_prefix_caching=True)
    return SimulatedEngine(Batcher(manager, 4, budget, 8192, snapshot_interval=interval), vocabulary=200)


def serve(engine: SimulatedEngine, prompt: list[int], max_tokens: int = 2) -> tuple[Request, int, int]:
    """Run one request to its end; returns it, the tokens computed and the steps made before it sampled."""
    serve.count = getattr(serve, "count", 0) + 1  # type: ignore[attr-defined]
    request = Request(f"r{serve.count}", prompt, SamplingParams(max_tokens=max_tokens))  # type: ignore[attr-defined]
    engine.batcher.add(request)
    before, steps = engine.num_tokens, 0
    while not request.num_output_tokens:
        engine.step()
        steps += 1
    computed = engine.num_tokens - before
    engine.run_to_the_end()
    return request, computed, steps


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_third_that_shares_a_prefix_goes_on_from_its_end(order: int) -> None:
    engine = make_engine()
    computed = [serve(engine, [*SHARED, *([mark] * 40)])[1] for mark in range(order)]
    assert computed == [520, 520, 40][:order]


def test_a_prompt_that_was_seen_is_computed_from_its_last_block_on() -> None:
    engine = make_engine()
    prompt = [*SHARED, *range(20)]
    assert [serve(engine, prompt)[1:] for _ in range(2)] == [(500, 2), (500 - 496, 1)]


@pytest.mark.parametrize(("length", "steps"), [(10, 1), (64, 1), (65, 2), (300, 2), (2048, 2), (2049, 2), (4000, 3)])
def test_chunks_are_cut_only_for_snapshots_that_are_worth_it(length: int, steps: int) -> None:
    assert serve(make_engine(), [7] * length)[2] == steps


def test_nothing_is_cut_where_no_slot_is_left() -> None:
    assert serve(make_engine(slots=1), [7] * 300)[2] == 1


@pytest.mark.parametrize("only_state", [False, True])
@pytest.mark.parametrize("reply", [5, 30, 64, 100, 200])
def test_an_append_only_chat_recomputes_little_of_its_past(only_state: bool, reply: int) -> None:
    engine = make_engine(only_state=only_state)
    history: list[int] = list(range(100))
    for turn in range(8):
        request, computed, _ = serve(engine, [*history, *([150 + turn] * 9)], reply)
        if turn:
            assert computed - 9 <= 64 + SIZE, f"turn {turn}"
        history = request.tokens(0, request.num_tokens)


def test_inside_long_prompts_snapshots_take_no_more_than_the_keys_and_values() -> None:
    engine = make_engine(budget=100, slots=40)
    serve(engine, list(range(150)) * 12)
    # One in 256 tokens or more, beside those at the end of the prompt and of a chat's turn.
    assert 5 <= engine.batcher.stats()["state_slots_cached"] <= 1800 // 256 + 1
    _, computed, _ = serve(engine, [*(list(range(150)) * 12)[:1100], 5])
    assert computed <= 256 + 100 + 1


def test_without_keys_and_values_only_ends_of_prompts_are_kept() -> None:
    engine = make_engine(budget=100, interval=None, only_state=True)
    serve(engine, list(range(150)) * 12)
    assert engine.batcher.stats()["state_slots_cached"] == 1
    assert serve(engine, [*(list(range(150)) * 12), 5])[1] == 1801 - 1792


def test_the_less_valuable_go_first_and_of_them_the_older() -> None:
    manager = BlockManager([BlockGroup(5, is_state=True)], 4, enable_prefix_caching=True)
    for name, value in [("a", 3), ("b", 1), ("c", 2), ("d", 1)]:
        manager.allocate(name, 4, 0)
        manager.end_step(name, 4)
        assert manager.keep_state(name, name.encode(), value)
        manager.free(name)
    gone = []
    for name in "vwxyz":
        manager.allocate(name, 1, 0)
        gone.append("".join(known for known in "abcd" if manager.pools[0].lookup(known.encode()) is None))
    assert gone == ["", "b", "bd", "bcd", "abcd"]
    manager.check()


def test_a_snapshot_does_not_drive_out_a_more_valuable_one() -> None:
    manager = BlockManager([BlockGroup(2, is_state=True)], 4, enable_prefix_caching=True)
    for name, value, kept in [("a", 3, True), ("b", 2, False), ("c", 3, True)]:
        manager.allocate(name, 4, 0)
        manager.end_step(name, 4)
        assert manager.keep_state(name, name.encode(), value) is kept
        manager.allocate(name, 5, 4)
        manager.end_step(name, 5)
        manager.free(name)


def test_while_decoding_the_latest_is_kept() -> None:
    engine = make_engine()
    request, _, _ = serve(engine, [1] * 100, max_tokens=300)
    found = engine.batcher.block_manager.find_prefix(request.block_hashes)
    assert found.num_blocks * SIZE >= 400 - 64 - SIZE and engine.batcher.stats()["state_slots_cached"] == 2


def test_a_step_that_failed_leaves_no_snapshot() -> None:
    engine = make_engine()
    request = Request("a", [7] * 300, SamplingParams(max_tokens=2))
    engine.batcher.add(request)
    engine.step(fails=True)
    manager = engine.batcher.block_manager
    assert manager.pools[-1].num_cached == 0 and not manager.pools[-1]._hash_of
    engine.run_to_the_end()
    assert manager.find_prefix(request.block_hashes).num_blocks == 18


def test_changed_weights_leave_no_snapshot_to_others() -> None:
    engine = make_engine()
    request = Request("a", [7] * 300, SamplingParams(max_tokens=200))
    engine.batcher.add(request)
    for _ in range(4):
        engine.step()
    engine.change_weights()
    engine.run_to_the_end()
    assert engine.batcher.stats()["state_slots_cached"] == 0
    assert serve(engine, [7] * 300)[1] == 300
