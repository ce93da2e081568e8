from __future__ import annotations

import asyncio
import random

import pytest

from torch_pagoda.serving.engine_process.client import EngineDied, RequestRefused
from torch_pagoda.serving.engine_process.delta_stream import MergedDeltas
from torch_pagoda.serving.engine_process.wire import Delta, RequestTimes, TokenLogprob

TIMES = RequestTimes(0.0, 0.0, 0.0, 1, 0)


def nobody(request_id: str) -> None:
    raise AssertionError("it was not cancelled")


def test_what_nobody_waits_for_is_merged() -> None:
    async def use() -> None:
        random.seed(0)
        stream = MergedDeltas("r", 2, nobody)
        want: dict[tuple[int, int], tuple[str, list[int], list[int]]] = {}
        found: dict[tuple[int, int], tuple[str, list[int], list[int]]] = {}

        async def take() -> None:
            for delta in await stream.next():
                text, ids, logprobs = found.get((delta.prompt_index, delta.index), ("", [], []))
                new = [entry[0].token_id for entry in delta.logprobs or ()]
                found[delta.prompt_index, delta.index] = text + delta.text, ids + delta.token_ids, logprobs + new

        for i in range(1000):
            key = random.randrange(2), random.randrange(2)
            text = random.choice(["", "a", "🙂", "word "])
            delta = Delta("r", *key, text, [i], [[TokenLogprob(i, -1.0, 1)]])
            known = want.get(key, ("", [], []))
            want[key] = known[0] + text, [*known[1], i], [*known[2], i]
            stream.put(delta)
            if random.random() < 0.01:
                await take()
        await take()
        assert found == want

    asyncio.run(use())


def test_there_is_at_most_one_delta_for_each_completion_and_the_end_is_kept() -> None:
    async def use() -> None:
        stream = MergedDeltas("r", 1, nobody)
        scores = [None, [TokenLogprob(3, -0.5, 1)]]
        stream.put(Delta("r", 0, 0, "a", [1], prompt_logprobs=scores))
        stream.put(Delta("r", 0, 1, "x", [1]))
        stream.put(Delta("r", 0, 0, "b", [2], finish_reason="stop", stop_reason="c", num_cached_tokens=8))
        stream.put(Delta("r", 0, 1, "", [2], finish_reason="error", error="why", times=TIMES))
        first, second = await stream.next()
        assert first == Delta("r", 0, 0, "ab", [1, 2], None, "stop", "c", None, scores, 8)
        assert second == Delta("r", 0, 1, "x", [1, 2], None, "error", None, "why", times=TIMES)
        assert stream.is_complete
        assert await stream.next() == [] == await stream.next()
        stream.cancel()

    asyncio.run(use())


def test_a_waiting_reader_is_woken() -> None:
    async def use() -> None:
        stream = MergedDeltas("r", 1, nobody)
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.put(Delta("r", 0, 0, "a", [1]))
        (delta,) = await waiting
        assert delta.text == "a"
        waiting = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        stream.fail(EngineDied("gone"))
        with pytest.raises(EngineDied, match="gone"):
            await waiting

    asyncio.run(use())


def test_what_has_come_is_read_before_the_failure() -> None:
    async def use() -> None:
        stream = MergedDeltas("r", 1, nobody)
        stream.put(Delta("r", 0, 0, "a", [1]))
        stream.fail(RequestRefused("invalid", "no"))
        stream.put(Delta("r", 0, 0, "b", [1]))
        assert [delta.text for delta in await stream.next()] == ["a"]
        for _ in range(2):
            with pytest.raises(RequestRefused, match="no"):
                await stream.next()

    asyncio.run(use())


def test_cancel_says_so_until_the_end() -> None:
    async def use() -> None:
        cancelled: list[str] = []
        stream = MergedDeltas("r", 1, cancelled.append)
        stream.cancel()
        assert cancelled == ["r"]
        stream.put(Delta("r", 0, 0, "", [], finish_reason="cancelled", times=TIMES))
        stream.cancel()
        assert cancelled == ["r"]
        assert [delta.finish_reason for delta in await stream.next()] == ["cancelled"]

    asyncio.run(use())


def test_nothing_comes_behind_the_last_delta() -> None:
    async def use() -> None:
        stream = MergedDeltas("r", 1, nobody)
        stream.put(Delta("r", 0, 0, "a", [1], finish_reason="stop", times=TIMES))
        stream.put(Delta("r", 0, 0, "late", [2]))
        assert await stream.next() == [Delta("r", 0, 0, "a", [1], finish_reason="stop", times=TIMES)]
        stream.put(Delta("r", 0, 0, "late", [2]))
        assert await stream.next() == []

    asyncio.run(use())
