"""``AsyncLLM``: many tasks, one engine in a thread of its own."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest

import torch_pagoda as pagoda

LONG = pagoda.SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
SECONDS = 60
"""After which a test that hangs fails."""


def greedy(count: int) -> pagoda.SamplingParams:
    return pagoda.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


@pytest.fixture
def llm(checkpoint: Path, fast: dict[str, Any]) -> pagoda.LLM:
    return pagoda.LLM(checkpoint, **fast)


@pytest.fixture
def served(llm: pagoda.LLM) -> Iterator[pagoda.AsyncLLM]:
    served = pagoda.AsyncLLM(llm)
    yield served
    served.shutdown()
    assert_idle(llm)


def assert_idle(llm: pagoda.LLM) -> None:
    """Nothing runs and every block is free; the block manager's own check is content."""
    engine = llm.engine
    while engine.has_unfinished():  # last outputs that nobody waits for
        engine.step()
    engine.batcher.check()
    assert engine.block_manager.num_available_blocks == engine.block_manager.num_blocks
    assert not engine._core.state.submissions and not engine._core.state.completions


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, SECONDS))


async def last(served: pagoda.AsyncLLM, *arguments: Any, **options: Any) -> pagoda.RequestOutput:
    found = None
    async for output in served.generate(*arguments, **options):
        if found is not None:
            before, now = found.outputs[0], output.outputs[0]
            assert now.token_ids[: len(before.token_ids)] == before.token_ids and not found.finished
        found = output
    assert found is not None and found.finished
    return found


def test_many_tasks_get_the_tokens_of_generate(llm: pagoda.LLM, served: pagoda.AsyncLLM) -> None:
    prompts = [[5 + i % 7, *range(40, 41 + i)] for i in range(24)]

    async def main() -> list[pagoda.RequestOutput]:
        return await asyncio.gather(
            *[last(served, prompt, greedy(4 + i % 9), f"r{i}") for i, prompt in enumerate(prompts)]
        )

    outputs = run(main())
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(24)]
    served.shutdown()
    expected = llm.generate(prompts, [greedy(4 + i % 9) for i in range(24)])
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]
    assert llm.stats()["steps"] < sum(4 + i % 9 for i in range(24))  # they shared steps


def test_cancelling_a_task_or_closing_the_iterator_frees_the_blocks(llm: pagoda.LLM, served: pagoda.AsyncLLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(last(served, [5, 6, 7], LONG, "mine"))
        async with aclosing(served.generate([8, 9], LONG)) as outputs:
            async for _ in outputs:
                break
        left = served.generate([10], LONG)
        await anext(left)
        del left  # without aclose: the event loop closes it
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        kept = await last(served, [11, 12], greedy(5), "mine")  # the id is free again, too
        assert len(kept.outputs[0].token_ids) == 5
        while (await served.stats())["running"]:
            await asyncio.sleep(0.001)
        stats = await served.stats()
        assert stats["blocks_used"] == 0 and stats["queue_length"] == 0

    run(main())
    assert llm.engine.block_manager.num_available_blocks == llm.engine.block_manager.num_blocks


def test_a_slow_consumer_gets_the_newest_and_delays_nobody(llm: pagoda.LLM, served: pagoda.AsyncLLM) -> None:
    async def main() -> list[int]:
        lengths = []
        async for output in served.generate([5, 6, 7], greedy(40)):
            lengths.append(len(output.outputs[0].token_ids))
            if len(lengths) == 1:
                quick = await last(served, [8], greedy(80))
                assert len(quick.outputs[0].token_ids) == 80
        return lengths

    lengths = run(main())
    assert lengths[0] < 40 and lengths[-1] == 40 and len(lengths) <= 3


def test_the_event_loop_is_not_blocked_by_a_step(llm: pagoda.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    step = llm.step

    def slow() -> list[pagoda.RequestOutput]:
        entered.set()
        assert leave.wait(SECONDS)
        return step()

    monkeypatch.setattr(llm, "step", slow)

    async def main() -> None:
        async with pagoda.AsyncLLM(llm) as served:
            task = asyncio.create_task(last(served, [5], greedy(2)))
            while not entered.is_set():
                await asyncio.sleep(0.001)
            other = asyncio.create_task(last(served, [6], greedy(2)))
            stats = asyncio.create_task(served.stats())
            await asyncio.sleep(0.01)  # the loop turns while the step is held
            assert not task.done() and not other.done() and not stats.done()
            leave.set()
            await asyncio.gather(task, other, stats)

    run(main())
    assert_idle(llm)


def test_refusals_reach_the_caller_alone(served: pagoda.AsyncLLM) -> None:
    async def main() -> None:
        good = asyncio.create_task(last(served, [5, 6], greedy(20), "taken"))
        await asyncio.sleep(0)
        for arguments, word in (
            (([5, 999],), "999"),
            (([5], greedy(2), "taken"), "in use"),
            (([5], "hot"), "SamplingParams"),
        ):
            with pytest.raises(ValueError, match=word):
                await last(served, *arguments)
        assert len((await good).outputs[0].token_ids) == 20

    run(main())


def test_a_full_queue_refuses(checkpoint: Path, fast: dict[str, Any]) -> None:
    llm = pagoda.LLM(checkpoint, max_num_seqs=1, max_queue=1, **fast)

    async def main() -> list[Any]:
        async with pagoda.AsyncLLM(llm) as served:
            each = [last(served, [5 + i], greedy(20)) for i in range(6)]
            return await asyncio.gather(*each, return_exceptions=True)

    results = run(main())
    assert any(isinstance(result, pagoda.QueueFull) for result in results)
    assert all(isinstance(result, pagoda.QueueFull | pagoda.RequestOutput) for result in results)
    assert_idle(llm)


def test_abort_gives_a_last_output(served: pagoda.AsyncLLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(last(served, [5, 6], LONG, "long"))
        while not await served.abort("long"):
            await asyncio.sleep(0.001)
        assert (await task).outputs[0].finish_reason == "cancelled"
        assert not await served.abort("long")

    run(main())


def test_an_error_of_the_engine_reaches_everybody_and_the_next_is_served(
    llm: pagoda.LLM, served: pagoda.AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, fails = llm.step, threading.Event()

    def failing() -> list[pagoda.RequestOutput]:
        if fails.is_set():
            raise OSError("no space left")
        return step()

    monkeypatch.setattr(llm, "step", failing)

    async def main() -> None:
        streams = [served.generate([5 + i], LONG, f"r{i}") for i in range(20)]
        for stream in streams:
            await anext(stream)
        fails.set()
        for stream in streams:
            with pytest.raises(RuntimeError, match="the engine failed: OSError: no space left") as error:
                async for _ in stream:
                    pass
            assert isinstance(error.value.__cause__, OSError)

    def failing_once() -> list[pagoda.RequestOutput]:
        monkeypatch.setattr(llm, "step", step)
        raise OSError("once")

    run(main())
    with pytest.raises(RuntimeError, match="no space left"):  # it failed with nobody there, so that it is given up
        run(last(served, [5], greedy(3)))
    served._stepper._thread.join(SECONDS)
    assert not served._stepper._thread.is_alive()

    monkeypatch.setattr(llm, "step", step)
    assert_idle(llm)
    monkeypatch.setattr(llm, "step", failing_once)

    async def again() -> None:
        async with pagoda.AsyncLLM(llm) as fresh:
            with pytest.raises(RuntimeError, match="once"):
                await last(fresh, [5], greedy(3), "r0")
            assert len((await last(fresh, [5], greedy(3), "r0")).outputs[0].token_ids) == 3

    run(again())


def test_an_event_loop_that_closes_takes_its_requests_along(llm: pagoda.LLM, served: pagoda.AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = served.generate([5, 6, 7], LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    stats = run(served.stats())
    until = time.monotonic() + SECONDS
    while stats["running"] and time.monotonic() < until:
        stats = run(served.stats())
    assert stats["running"] == stats["queue_length"] == stats["blocks_used"] == 0
    assert stats["generated_tokens"] < 400  # it ended long before its context was full
    assert len(run(last(served, [5], greedy(3))).outputs[0].token_ids) == 3  # others are served


def test_several_event_loops_share_the_engine(llm: pagoda.LLM, served: pagoda.AsyncLLM) -> None:
    found: dict[int, list[int]] = {}

    def serve(i: int) -> None:
        found[i] = run(last(served, [5 + i], greedy(12))).outputs[0].token_ids

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    served.shutdown()
    expected = llm.generate([[5 + i] for i in range(4)], greedy(12))
    assert [found[i] for i in range(4)] == [output.outputs[0].token_ids for output in expected]


@pytest.mark.parametrize("owns", [True, False])
def test_shutdown_ends_what_runs(checkpoint: Path, fast: dict[str, Any], owns: bool) -> None:
    async def main() -> None:
        served = pagoda.AsyncLLM(checkpoint, **fast) if owns else pagoda.AsyncLLM(pagoda.LLM(checkpoint, **fast))
        stream = served.generate([5, 6], LONG)
        await anext(stream)
        await asyncio.to_thread(served.shutdown)
        assert [output.outputs[0].finish_reason async for output in stream][-1] == "cancelled"
        for call in (lambda: last(served, [5], greedy(2)), lambda: served.abort("0"), served.stats):
            with pytest.raises(RuntimeError, match="shut down"):
                await call()
        served.shutdown()  # twice is once
        if owns:
            with pytest.raises(RuntimeError, match="shut down"):
                served.llm.generate([[5]], greedy(2))
        else:
            assert len(served.llm.generate([[5]], greedy(2))[0].outputs[0].token_ids) == 2
            assert_idle(served.llm)

    run(main())


def test_one_that_is_forgotten_ends_its_thread(llm: pagoda.LLM) -> None:
    served = pagoda.AsyncLLM(llm)
    run(last(served, [5], greedy(2)))
    thread, gone = served._stepper._thread, weakref.ref(served)
    del served
    gc.collect()
    thread.join(SECONDS)
    assert gone() is None and not thread.is_alive()


def test_options_beside_an_llm_are_refused(llm: pagoda.LLM) -> None:
    with pytest.raises(TypeError, match="already an LLM; pass tokenizer, dtype to that LLM"):
        pagoda.AsyncLLM(llm, "x", dtype="float32")
