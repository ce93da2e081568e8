"""A batcher over one group of blocks, and what an engine does with its schedules, for tests."""

from __future__ import annotations

from torch_pagoda.runtime.batching import Batcher, Schedule
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams


def make_batcher(num_blocks=64, block_size=4, seqs=8, budget=32, max_len=None, **options):
    caching = options.pop("caching", False)
    group = BlockGroup(num_blocks, window=options.pop("window", 0), num_host_blocks=options.pop("host", 0))
    blocks = BlockManager([group], block_size, enable_prefix_caching=caching)
    return Batcher(blocks, seqs, budget, blocks.capacity if max_len is None else max_len, **options)


def make_request(name, prompt=3, max_tokens=4, **options):
    tokens = [1] * prompt if isinstance(prompt, int) else list(prompt)
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), **options)


def next_token(request):
    """A stand-in for the model: depends on everything before it."""
    return hash((*request.prompt_token_ids, *request.output_token_ids)) % 1000


def run(batcher: Batcher, schedule: Schedule):
    """What an engine does with a schedule."""
    for item in schedule.requests:
        batcher.advance(item.request, item.num_tokens)
        if item.is_last_chunk:
            item.request.output_token_ids.append(next_token(item.request))
            request = item.request
            if request.num_output_tokens >= request.params.max_tokens or request.num_tokens >= batcher.max_model_len:
                batcher.finish(request, "length")


def shares(schedule):
    return [(item.request.request_id, item.start, item.num_tokens, item.is_last_chunk) for item in schedule.requests]


def finish_all(batcher, limit=10_000):
    """Run to the end; returns how many tokens were computed."""
    computed = 0
    while batcher.has_unfinished():
        limit -= 1
        assert limit > 0
        schedule = batcher.schedule()
        computed += schedule.num_tokens
        run(batcher, schedule)
        batcher.check()
    return computed
