"""The changes of the prefix cache that a router hears of."""

from __future__ import annotations

import random

import pytest

from torch_pagoda.runtime.batching import Batcher, snapshots
from torch_pagoda.runtime.batching.cache_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheEvents,
)
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager, chain_start, extend_chain
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from simulated_engine import TIMES, SimulatedEngine

SIZE = 4
GROUPS = {
    "full": [BlockGroup(16, num_host_blocks=30)],
    "window": [BlockGroup(9, window=6, num_host_blocks=10)],
    "hybrid": [BlockGroup(16, window=9, num_host_blocks=40), BlockGroup(24, num_host_blocks=9)],
    "state": [BlockGroup(14, is_state=True, num_host_blocks=3)],
}
REPORTED = {"full": 0, "window": 0, "hybrid": 1, "state": 0}


@pytest.fixture(autouse=True)
def small_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are short here."""
    monkeypatch.setattr(snapshots, "WORTH", 8)


def apply(events: list[CacheEvent], known: set[bytes], tokens: dict[bytes, tuple[bytes | None, list[int]]]) -> None:
    """What a subscriber does with events."""
    for event in events:
        if isinstance(event, BlocksStored):
            assert event.hashes
            known.update(event.hashes)
            parent = event.parent
            for i, content in enumerate(event.hashes if event.tokens else ()):
                tokens[content] = parent, event.tokens[i * SIZE : (i + 1) * SIZE]
                parent = content
        elif isinstance(event, BlocksRemoved):
            assert known.issuperset(event.hashes)
            known.difference_update(event.hashes)
        else:
            assert isinstance(event, AllBlocksCleared)
            known.clear()


@pytest.mark.parametrize(
    ("kind", "with_tokens"),
    [(kind, tokens) for kind in GROUPS for tokens in (False, True) if kind != "state" or not tokens],
)
def test_a_subscriber_knows_what_the_pool_knows(kind: str, with_tokens: bool) -> None:
    rng = random.Random(5)
    manager = BlockManager(GROUPS[kind], SIZE, enable_prefix_caching=True)
    batcher = Batcher(manager, 6, 24, 60, preemption="swap", snapshot_interval=8)
    batcher.cache_events = CacheEvents(manager, with_tokens=with_tokens)
    pool = manager.pools[REPORTED[kind]]
    engine = SimulatedEngine(batcher)
    known: set[bytes] = set()
    tokens: dict[bytes, tuple[bytes | None, list[int]]] = {}
    most, from_host = 0, False
    for i in range(60):
        prompt = list(range(10, 10 + rng.choice((0, 8, 12)))) + [
            rng.randrange(3) for _ in range(rng.randrange(1, 30))
        ]
        batcher.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=rng.randrange(1, 25))), engine.now)
        for _ in range(rng.choice((1, 2, 5))):
            engine.step(rng.choice(TIMES))
            engine.now += 0.1
            if rng.random() < 0.1:
                manager.defragment()
            if rng.random() < 0.02:
                engine.change_weights()
            apply(batcher.cache_events.take(), known, tokens)
            found = set(pool._block_of)
            from_host = from_host or known != found
            # The tokens of blocks that come back from the host are not at hand.
            assert known == found or (with_tokens and known < found)
            most = max(most, len(known))
    assert most > 5 and engine.now > 10 and pool.evictions
    assert with_tokens or not from_host
    for content, (parent, ids) in tokens.items():
        hashes = [] if parent is None else [parent]
        extend_chain(hashes, ids, len(hashes) * SIZE, SIZE, chain_start(""))
        assert hashes[-1] == content
    assert bool(tokens) == with_tokens


def test_what_cannot_be_reported_is_refused() -> None:
    with pytest.raises(ValueError, match="enable_prefix_caching=False"):
        CacheEvents(BlockManager(GROUPS["full"], SIZE))
    with pytest.raises(ValueError, match="states and no KV blocks"):
        CacheEvents(BlockManager(GROUPS["state"], SIZE, enable_prefix_caching=True), with_tokens=True)
