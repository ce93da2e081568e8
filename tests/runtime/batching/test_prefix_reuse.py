from __future__ import annotations

import pytest

from torch_pagoda.runtime.batching.shared_prefixes import SharedPrefixes
from torch_pagoda.runtime.blocks import chain_start, extend_chain
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from batcher_steps import finish_all, make_batcher, make_request, run, shares


def test_a_second_turn_computes_only_what_is_new():
    batcher = make_batcher(caching=True)
    first = make_request("1", prompt=range(10), max_tokens=7)
    batcher.add(first)
    finish_all(batcher)
    history = [*first.prompt_token_ids, *first.output_token_ids]
    second = make_request("2", prompt=[*history, 5, 6, 7], max_tokens=2)
    batcher.add(second)
    (share,) = shares(batcher.schedule())
    # The last sampled token was never computed: 16 of 17 tokens, all of them in full blocks.
    assert len(history) == 17 and share == ("2", 16, 4, True)
    assert second.num_cached_tokens == 16
    stats = batcher.stats()
    assert (stats["prefix_query_tokens"], stats["prefix_hit_tokens"]) == (30, 16)
    assert stats["prefix_hit_rate"] == pytest.approx(16 / 30)


def test_the_last_token_is_always_computed():
    batcher = make_batcher(caching=True)
    for name in "ab":
        batcher.add(make_request(name, prompt=range(12), max_tokens=1))
        finish_all(batcher)
    assert batcher.stats()["prefix_hit_tokens"] == 8


def test_a_block_is_found_only_after_it_is_computed():
    batcher = make_batcher(caching=True, budget=8)
    batcher.add(make_request("a", prompt=range(20), max_tokens=9))
    batcher.schedule()
    batcher.requeue_all()
    run(batcher, batcher.schedule())
    tokens = list(range(20))
    hashes: list[bytes] = []
    extend_chain(hashes, tokens, 0, 4, chain_start(""))
    assert batcher.block_manager.find_prefix(hashes).num_blocks == 2
    batcher.schedule()
    assert batcher.block_manager.find_prefix(hashes).num_blocks == 2, "planned is not computed"


def test_salts_and_variants_share_nothing():
    batcher = make_batcher(caching=True, key_variant=lambda request: request.client)
    for name, client, salt in [("a", "", ""), ("b", "", "x"), ("c", "v", ""), ("d", "v", "x")]:
        batcher.add(make_request(name, prompt=range(12), max_tokens=1, client=client, cache_salt=salt))
        finish_all(batcher)
    assert batcher.stats()["prefix_hit_tokens"] == 0
    batcher.add(make_request("e", prompt=range(12), max_tokens=1, client="v", cache_salt="x"))
    finish_all(batcher)
    assert batcher.stats()["prefix_hit_tokens"] == 8


def test_prompts_that_are_scored_are_computed_in_full():
    batcher = make_batcher(caching=True)
    for name, scored in [("a", None), ("b", 0), ("c", None)]:
        request = Request(name, list(range(12)), SamplingParams(max_tokens=1, prompt_logprobs=scored))
        batcher.add(request)
        finish_all(batcher)
        assert request.num_cached_tokens == (8 if name == "c" else 0)


def test_who_needs_what_is_being_computed_waits_for_it():
    """Two equal prompts that arrive together are not computed twice."""
    batcher = make_batcher(caching=True, budget=8)
    for name in "ab":
        batcher.add(make_request(name, prompt=range(17), max_tokens=2))
    assert finish_all(batcher) == 18 + 2


def test_waiting_for_what_is_being_computed_ends():
    """What others compute may be evicted before the request comes to use it."""
    batcher, request = make_batcher(caching=True), make_request("a", prompt=range(17))
    prefixes = SharedPrefixes(batcher.block_manager, batcher.policy, lambda request: "")
    computing = set(prefixes.full_blocks(request))
    assert [prefixes.defers(request, computing) for _ in range(18)] == [True] * 16 + [False] * 2


def test_a_prefix_survives_as_long_as_its_blocks_are_not_needed():
    batcher = make_batcher(num_blocks=8, caching=True, max_len=32)
    batcher.add(make_request("a", prompt=range(12), max_tokens=1))
    finish_all(batcher)
    batcher.add(make_request("b", prompt=range(100, 124), max_tokens=1))  # takes six blocks of eight
    finish_all(batcher)
    batcher.add(make_request("c", prompt=range(12), max_tokens=1))
    finish_all(batcher)
    # Of a's three blocks the last one went first: two are left.
    assert batcher.stats()["prefix_hit_tokens"] == 8
