"""Engines that share a store: what is found there, and what is wrong there, changes no token."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from stored_blocks import FailingStore, answers, cached, generate, patience, store_engine, traffic
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.block_store import traffic as traffic_module
from torch_pagoda.runtime.block_store.entries import Seal, entry_key
from torch_pagoda.runtime.engine import cache_setup

from batcher_steps import make_batcher, make_request
from toy_program import ToyProgram

PROMPT = random.Random(1).choices(range(3, 60), k=81)
PROMPTS = [PROMPT, PROMPT[:22], [*PROMPT[:17], 4, 5, 6, 7, 8, 9, 10, 11]]
PROGRAMS: dict[str, Callable[[], Any]] = {
    "plain": ToyProgram,
    "windows": lambda: ToyProgram(windows=(0, 8)),
    "window": lambda: ToyProgram(windows=(8, 8)),
    "states": ToyStateProgram,
    "states alone": lambda: ToyStateProgram(with_kv=False),
}


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """However loaded the machine is; and threads for tiny products only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with patience():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=PROGRAMS)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return PROGRAMS[request.param]


def right(make: Callable[[], Any], prompts: list[list[int]]) -> list[list[int]]:
    return [_right(make, tuple(prompt)) for prompt in prompts]


@cache
def _right(make: Callable[[], Any], prompt: tuple[int, ...]) -> list[int]:
    return make().dense_greedy(list(prompt), 6)  # type: ignore[no-any-return]


def fill(make: Callable[[], Any], folder: Path, prompts: list[list[int]], **options: Any) -> None:
    """Let an engine store what it computes for the prompts, one after the other."""
    engine = store_engine(make(), folder, **options)
    for prompt in prompts:
        assert answers(engine, [prompt]) == right(make, [prompt])
    engine.shutdown()


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/*") if path.is_file())


def test_another_engine_takes_all_full_blocks(make: Callable[[], Any], tmp_path: Path) -> None:
    fill(make, tmp_path, [PROMPT])
    engine = store_engine(make(), tmp_path)
    (output,) = generate(engine, [PROMPT])
    assert output.outputs[0].token_ids == right(make, [PROMPT])[0]
    assert output.num_cached_tokens == 80
    stats = engine.stats()
    assert stats["cached_tokens"] == 80 and stats["kv_store_misses"] == stats["kv_store_failed_loads"] == 0
    assert stats["kv_store_hits"] > 0 and stats["kv_store_read_bytes"] > 0 == stats["kv_store_written_bytes"]
    engine.batcher.check()
    engine.shutdown()


def test_every_turn_of_a_chat_goes_on_from_the_one_before(make: Callable[[], Any], tmp_path: Path) -> None:
    """Each turn in another engine, which has seen none of it."""
    chat, draw, before = PROMPT[:10], random.Random(2), 0
    for turn in range(6):
        engine = store_engine(make(), tmp_path)
        (output,) = generate(engine, [chat])
        engine.shutdown()
        assert output.outputs[0].token_ids == right(make, [chat])[0]
        if turn and isinstance(make(), ToyProgram):
            assert output.num_cached_tokens == before // 4 * 4, "all that was computed in the turn before"
        before = len(chat) + 5  # the last token of an answer is not computed
        chat = [*chat, *output.outputs[0].token_ids, *(draw.randrange(3, 60) for _ in range(3))]


def test_what_one_request_has_asked_for_is_not_stored(tmp_path: Path) -> None:
    engine = store_engine(ToyProgram(), tmp_path, kv_store_write="reused")
    answers(engine, [PROMPT])
    answers(engine, [[*PROMPT[:21], 3, 3, 3]])
    engine.shutdown()
    other = store_engine(ToyProgram(), tmp_path)
    assert cached(other, [PROMPT]) == [20]
    other.shutdown()


@pytest.mark.parametrize("lost", [slice(0), slice(None), slice(3, 9)], ids=str)
def test_what_the_store_has_dropped_is_written_again_where_all_is_stored(
    make: Callable[[], Any], tmp_path: Path, lost: slice
) -> None:
    engine = store_engine(make(), tmp_path)
    answers(engine, [PROMPT])
    written = wait_stored(engine)
    for path in entries(tmp_path)[lost]:
        path.unlink()
    assert cached(engine, [PROMPT]) == [80] and engine.num_stored() > written
    wait_stored(engine)
    other = store_engine(make(), tmp_path)
    assert cached(other, [PROMPT]) == [80] and answers(other, [PROMPT]) == right(make, [PROMPT])
    engine.shutdown()
    other.shutdown()


def wait_stored(engine: Any) -> int:
    """Wait until all that was queued is in the store; returns how much that is."""
    count, end = engine.num_stored(), time.monotonic() + 60
    while not engine.is_stored(count):
        assert time.monotonic() < end
        time.sleep(0.001)
    return int(count)


def test_salts_share_nothing(tmp_path: Path) -> None:
    engine = store_engine(ToyProgram(), tmp_path)
    answers(engine, [PROMPT], cache_salt="a")
    engine.shutdown()
    other = store_engine(ToyProgram(), tmp_path)
    assert cached(other, [PROMPT], cache_salt="b") == [0] and cached(other, [PROMPT]) == [0]
    assert other.stats()["kv_store_hits"] == 0
    assert cached(other, [PROMPT], cache_salt="a") == [80]
    other.shutdown()


@pytest.mark.parametrize(
    "options", [{"fingerprint": b"another model..."}, {"block_size": 8}, {"kv_store_key_file": "key"}], ids=str
)
def test_another_model_finds_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    if "kv_store_key_file" in options:
        options = {"kv_store_key_file": str(tmp_path / "key")}
        Path(options["kv_store_key_file"]).write_bytes(b"0123456789abcdef0123456789abcdef")
        os.chmod(options["kv_store_key_file"], 0o600)
    fill(ToyProgram, tmp_path / "kv", [PROMPT])
    engine = store_engine(ToyProgram(), tmp_path / "kv", **options)
    assert cached(engine, [PROMPT]) == [0] and engine.stats()["kv_store_hits"] == 0
    engine.shutdown()
    again = store_engine(ToyProgram(), tmp_path / "kv", **options)
    assert cached(again, [PROMPT]) == [80], "but its own"
    again.shutdown()


def test_a_run_ends_at_the_first_missing_block(tmp_path: Path) -> None:
    fill(ToyProgram, tmp_path, [PROMPT])
    probe = store_engine(ToyProgram(), tmp_path)
    answers(probe, [PROMPT])
    contents = [content for _, content in traffic(probe)._stored]
    traffic(probe)._store._file(entry_key(contents[4], 0, 1)).unlink()
    probe.shutdown()
    engine = store_engine(ToyProgram(), tmp_path)
    (output,) = generate(engine, [PROMPT])
    assert output.num_cached_tokens == 16 and output.outputs[0].token_ids == right(ToyProgram, [PROMPT])[0]
    engine.shutdown()


def test_all_groups_must_have_their_blocks(make: Callable[[], Any], tmp_path: Path) -> None:
    """Whichever entry is missing or damaged, the tokens are right."""
    fill(make, tmp_path, [PROMPT])
    expected, draw = right(make, [PROMPT]), random.Random(3)
    for path in draw.sample(entries(tmp_path), min(8, len(entries(tmp_path)))):
        whole = path.read_bytes()
        for damaged in (None, whole[:-3], whole[:70] + bytes([whole[70] ^ 64]) + whole[71:]):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            engine = store_engine(make(), tmp_path, kv_store_write="reused")
            assert answers(engine, [PROMPT]) == expected
            stats = engine.stats()
            # Those behind a window are not read, and of snapshots only the last one.
            assert stats["kv_store_damaged"] == stats["kv_store_failed_loads"] <= (damaged is not None)
            engine.batcher.check()
            engine.shutdown()
        path.write_bytes(whole)


def test_all_damaged_is_none_found(make: Callable[[], Any], tmp_path: Path) -> None:
    fill(make, tmp_path, [PROMPT])
    for path in entries(tmp_path):
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
    engine = store_engine(make(), tmp_path)
    (output,) = generate(engine, [PROMPT])
    assert output.outputs[0].token_ids == right(make, [PROMPT])[0]
    assert output.num_cached_tokens == engine.stats()["kv_store_hits"] == 0 < engine.stats()["kv_store_damaged"]
    engine.shutdown()


def test_whoever_waits_too_long_is_computed(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(make, tmp_path, [PROMPT])
    engine = store_engine(make(), tmp_path, kv_store_wait=30.0)
    moved, is_let_go = traffic(engine), []
    load = moved._store.load

    def slow(keys: Any, into: Any) -> Any:
        moved._wait = 0.0  # the request has waited long enough as soon as the thread reads
        while not is_let_go:
            time.sleep(0.001)
        return load(keys, into)

    monkeypatch.setattr(moved._store, "load", slow)
    expected = right(make, PROMPTS)
    assert [answers(engine, [prompt]) for prompt in PROMPTS] == [[tokens] for tokens in expected]
    assert engine.stats()["kv_store_hits"] == 0
    engine.batcher.check()
    engine._core._recover()
    space = engine.block_manager.swap_space
    assert any(space.lent), "the thread still writes into these"
    assert all(pool.is_held(block) for pool, own in zip(space.pools, space.lent, strict=True) for block in own)
    is_let_go.append(True)
    end = time.monotonic() + 30
    while any(engine.block_manager.swap_space.lent) and time.monotonic() < end:
        answers(engine, [[5, 6, 7]])
        time.sleep(0.01)
    assert not any(engine.block_manager.swap_space.lent), "what came too late is let go"
    assert answers(engine, PROMPTS) == expected
    engine.batcher.check()
    engine.shutdown()


def test_a_store_that_hangs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = store_engine(ToyProgram(), tmp_path)
    is_let_go: list[bool] = []

    def hang(keys: Any) -> list[bool]:
        while not is_let_go:
            time.sleep(0.001)
        return [False] * len(keys)

    monkeypatch.setattr(traffic(engine)._store, "known", hang)
    monkeypatch.setattr(traffic_module, "_STALLED_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING):
        assert answers(engine, PROMPTS) == right(ToyProgram, PROMPTS), "although it may wait for 30 s"
        assert answers(engine, [PROMPT[:30]]) == right(ToyProgram, [PROMPT[:30]])
    assert caplog.text.count("does not answer") == 1
    is_let_go.append(True)
    engine.shutdown()


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_change_no_token(
    make: Callable[[], Any], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines one after the other over a store that fails in every way, with scarce blocks and requests that end."""
    draw = random.Random(seed)
    opened = cache_setup.open_block_store
    monkeypatch.setattr(
        cache_setup, "open_block_store", lambda *given: FailingStore(opened(*given), draw.randrange(1 << 30))
    )
    prompts = [
        [*PROMPT[: draw.choice([8, 16, 40, 72])], *(draw.randrange(3, 60) for _ in range(draw.randrange(1, 9)))]
        for _ in range(5)
    ]
    expected = right(make, prompts)
    for _ in range(3):
        engine = store_engine(
            make(),
            tmp_path,
            num_blocks=draw.choice([24, 64]),
            max_num_seqs=draw.choice([2, 8]),
            max_num_batched_tokens=draw.choice([8, 32]),
            kv_store_wait=draw.choice([0.0, 0.005, 30.0]),
            preemption=draw.choice(["recompute", "swap"]),
            async_scheduling=draw.random() < 0.4,
        )
        for prompt in draw.sample(prompts, 2):
            engine.submit(prompt, request_id=f"gone {prompt}")
        engine.step()
        engine.batcher.check()
        engine.cancel_many([f"gone {prompt}" for prompt in prompts])
        if draw.random() < 0.5:
            with engine._core.transaction:
                engine._core._is_consistent = False
            engine._core._recover()
        assert answers(engine, prompts) == expected
        engine.batcher.check()
        assert not getattr(engine.runner.program, "mistakes", [])
        engine.shutdown()


def test_after_the_weights_changed_nothing_is_found_or_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(ToyProgram, tmp_path, [PROMPT])
    before = entries(tmp_path)
    engine = store_engine(ToyProgram(), tmp_path)
    engine.reset_prefix_cache()
    assert cached(engine, [PROMPT, [9, *PROMPT]]) == [0, 0] and "not used any more" in caplog.text
    engine.shutdown()
    assert entries(tmp_path) == before


def test_a_failed_step_stores_nothing(tmp_path: Path) -> None:
    program = ToyProgram()
    engine = store_engine(program, tmp_path)

    def fail(tokens: object) -> None:
        raise RuntimeError("no")

    program.before_call = fail
    (output,) = generate(engine, [PROMPT])
    assert output.outputs[0].finish_reason == "error"
    engine.shutdown()
    assert entries(tmp_path) == []


def test_what_was_read_while_a_step_is_planned_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that ends behind the moment at which arrivals are taken is not over for the request."""
    fill(ToyProgram, tmp_path, [PROMPT])
    engine = store_engine(ToyProgram(), tmp_path)
    take = traffic(engine).take_arrived

    def take_and_be_overtaken() -> None:
        take()
        fetches = list(traffic(engine)._fetches.values())
        end = time.monotonic() + 10
        while fetches and not fetches[0].is_over and fetches[0].blocks and time.monotonic() < end:
            time.sleep(0.001)

    monkeypatch.setattr(traffic(engine), "take_arrived", take_and_be_overtaken)
    assert cached(engine, [PROMPT]) == [80]
    engine.shutdown()


def test_a_full_queue_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "_MOST_QUEUED", 3)
    engine = store_engine(ToyProgram(), tmp_path)
    assert answers(engine, [PROMPT]) == right(ToyProgram, [PROMPT])
    assert engine.stats()["kv_store_dropped_writes"] == 17
    engine.shutdown()
    assert 0 < len(entries(tmp_path)) < 40


def test_what_is_only_launched_is_not_stored() -> None:
    batcher, request = make_batcher(num_blocks=8, block_size=2, budget=16), make_request("a", prompt=9, max_tokens=2)
    batcher.planner.traffic = noted = mock.Mock(**{"is_awaited.return_value": False})
    batcher.block_manager.swap_space.num_blocks = [0]
    batcher.add(request)
    batcher.schedule()
    batcher.launch(request, 9, 1)
    noted.settled.assert_not_called()
    request.output_token_ids.append(5)
    batcher.settle(request, 9, 1)
    noted.settled.assert_called_once_with(request, 9)


def test_seals_of_entries_differ() -> None:
    key, content = entry_key(b"k" * 16, 0, 0), memoryview(b"content")
    seals = [Seal(b"f" * 16), Seal(b"g" * 16), Seal(b"f" * 16, b"secret")]
    heads = {seal.head(each, content) for seal in seals for each in (key, entry_key(b"k" * 16, 1, 0))}
    assert len(heads) == 6 and len({seal.name(key) for seal in seals}) == 3
