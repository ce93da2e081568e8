"""The choice of an engine for a prompt."""

from __future__ import annotations

import random
from collections import OrderedDict, deque

import pytest

from torch_pagoda.serving.engine_process.routing import PrefixRouter

A = [b"a0", b"a1", b"a2"]


def test_the_engine_with_most_of_the_prompt_gets_it() -> None:
    router = PrefixRouter()
    router.stored(1, A[:1])
    router.stored(2, A)
    assert router.choose([*A, b"a3"], [0, 0, 0]) == 2
    router.removed(2, A[1:])
    assert router.choose(A[:1], [0, 1, 0]) == 2, "of two that hold as much, the less loaded"


def test_prompts_that_come_together_go_to_one_engine() -> None:
    router = PrefixRouter()
    first = router.choose(A, [0, 0, 0, 0])
    loads: list[float | None] = [0, 0, 0, 0]
    loads[first] = 1
    assert router.choose(A, loads) == first


def test_a_prompt_leaves_an_engine_that_has_too_much_to_do() -> None:
    router = PrefixRouter()
    router.stored(0, A)
    assert router.choose(A, [2, 0]) == 0
    assert router.choose(A, [3, 0]) == 1
    assert router.choose(A, [30, 29]) in (0, 1)
    assert router.choose([b"x"], [12, 4]) == 1


def test_an_engine_that_takes_nothing_is_not_chosen() -> None:
    router = PrefixRouter()
    router.stored(0, A)
    assert {router.choose(A, [None, 0, None]) for _ in range(20)} == {1}
    with pytest.raises(ValueError, match="no engine"):
        router.choose(A, [None, None, None])


def test_a_new_engine_holds_nothing() -> None:
    router = PrefixRouter()
    router.stored(0, A)
    router.choose([b"b"], [None, 0])
    router.cleared(0)
    router.cleared(1)
    assert not router._held and not router._coming
    assert {router.choose([f"c{i}".encode(), *A[:1]], [1, 0]) for i in range(9)} == {1}


def test_snapshots_count_without_the_blocks_before_them() -> None:
    router = PrefixRouter()
    router.stored(1, [A[1]])
    assert router.choose(A, [0, 0]) == 1


@pytest.mark.parametrize(("engines", "prefixes"), [(2, 32), (4, 32), (64, 512)])
def test_prefixes_are_hit_and_queues_stay_even(engines: int, prefixes: int) -> None:
    """Simulated: arrivals at 0.8 of the capacity, prefixes by Zipf's law, eight requests served at once."""
    hits = {}
    for count in (1, engines):
        rng = random.Random(1)
        router = PrefixRouter()
        caches: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        queues: list[list[tuple[list[bytes], float]]] = [[] for _ in range(count)]
        weights = [1 / (i + 1) ** 0.8 for i in range(prefixes)]
        news: deque[tuple[int, bytes, bool]] = deque()
        arriving, found, asked, worst = 0.0, 0, 0, []
        for step in range(400 if engines < 64 else 150):
            arriving += engines * 0.8  # The single engine stands for all: it is as fast, and holds as much.
            while arriving >= 1:
                arriving -= 1
                prefix = rng.choices(range(prefixes), weights)[0]
                hashes = [b"%d/%d" % (prefix, i) for i in range(12)] + [rng.randbytes(8) for _ in range(2)]
                queues[router.choose(hashes, list(map(len, queues)))].append((hashes, rng.expovariate(1 / 6)))
            for engine, queue in enumerate(queues):
                served, queue[:] = queue[: 8 * engines // count], queue[8 * engines // count :]
                for hashes, left in served:
                    if left > 1:
                        queue.append((hashes, left - 1))
                        continue
                    cache = caches[engine]
                    found += next((i for i, content in enumerate(hashes) if content not in cache), len(hashes))
                    asked += len(hashes)
                    for content in hashes:
                        if content not in cache:
                            news.append((engine, content, True))
                        cache[content] = None
                        cache.move_to_end(content)
                    while len(cache) > 12 * 24 * engines // count:
                        news.append((engine, cache.popitem(last=False)[0], False))
            if step % 4 == 0:
                for engine, content, is_stored in news:
                    (router.stored if is_stored else router.removed)(engine, [content])
                news.clear()
            mean = sum(map(len, queues)) / count
            if step > 40 and mean >= 2:
                worst.append(max(map(len, queues)) / mean)
        hits[count] = found / asked
    assert hits[engines] >= 0.9 * hits[1] > 0.3
    assert sorted(worst)[len(worst) // 2] <= 1.55


def test_leading_blocks_that_engines_hold_are_counted() -> None:
    router, (a, b, c) = PrefixRouter(), (bytes([i]) * 16 for i in range(3))
    router.stored(0, [a, b])
    router.stored(1, [a])
    assert [router.num_held([a, b, c], engines) for engines in ([0, 1], [1], [2], [])] == [2, 1, 0, 0]
    router.stored(2, [c])  # of a state, say, whose earlier blocks nobody needs
    assert router.num_held([a, b, c], [1, 2]) == 3
    router.choose([a, b, c], [None, 0.0, None])  # it is only about to hold them
    assert router.num_held([a, b, c], [1]) == 1
