"""Batches that are formed once, beside the continuous batching that replaced them."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.runtime.batching import Batches, PaddedBatches, StaticBatches
from torch_pagoda.runtime.batching.waiting import WaitingQueue
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram


def queue_of(lengths: list[int], max_tokens: int = 10) -> WaitingQueue:
    waiting = WaitingQueue()
    for i, length in enumerate(lengths):
        request = Request(str(i), [1] * length, SamplingParams(max_tokens=max_tokens), arrival_time=float(i))
        request.rank = (float(i), i)
        waiting.push(request)
    return waiting


def names(batch: list[Request]) -> list[str]:
    return [request.request_id for request in batch]


def test_a_static_batch_is_the_head_of_the_queue() -> None:
    assert names(StaticBatches().form(queue_of([5, 1, 9, 2]), 3, 0.0)) == ["0", "1", "2"]


def test_a_padded_batch_is_of_like_length_and_within_its_tokens() -> None:
    # 20 + 10 tokens each: three of the length of the first, not the ones of 90.
    waiting = queue_of([20, 90, 21, 90, 19, 22])
    assert names(PaddedBatches(max_padded_tokens=100).form(waiting, 8, 0.0)) == ["0", "2", "4"]
    assert names(PaddedBatches(max_padded_tokens=10_000).form(waiting, 2, 0.0)) == ["0", "2"]
    assert names(PaddedBatches(max_padded_tokens=1).form(waiting, 8, 0.0)) == ["0"], "never empty for its size"
    assert len(waiting) == 6


def test_a_padded_batch_waits_until_it_is_full_or_its_first_has_waited() -> None:
    batches = PaddedBatches(max_padded_tokens=1000, max_wait=5.0)
    assert batches.form(queue_of([20, 20]), 8, 4.9) == []
    assert names(batches.form(queue_of([20, 20]), 8, 5.0)) == ["0", "1"]
    assert names(batches.form(queue_of([20, 20]), 2, 0.0)) == ["0", "1"], "full"


@pytest.mark.parametrize("options", [{"max_padded_tokens": 0}, {"max_wait": -1.0}, {"lookahead": 0}])
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}={options[name]}"):
        PaddedBatches(**options)


PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [60, 61], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("batches", [None, StaticBatches(), PaddedBatches(60), PaddedBatches(10**6, max_wait=0.01)])
@pytest.mark.parametrize("num_blocks", [64, 11])
def test_tokens_do_not_depend_on_the_mode(batches: Batches | None, num_blocks: int) -> None:
    program = ToyProgram()
    engine = Engine(
        program, block_size=4, num_blocks=num_blocks, max_num_seqs=3, max_num_batched_tokens=16, batches=batches
    )
    counts = [3, 12, 7, 9, 5]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in counts]
    outputs = engine.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == [
        program.dense_greedy(prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)
    ]
    engine.batcher.check()
    assert engine.stats()["blocks_used"] == 0


def test_nobody_joins_a_batch_that_runs() -> None:
    engine = Engine(ToyProgram(), block_size=4, num_blocks=64, max_num_seqs=2, batches=StaticBatches())
    for i, count in enumerate([2, 9, 2, 2]):
        engine.submit([1, 2, i], SamplingParams(temperature=0, max_tokens=count), request_id=str(i))
    ends: dict[str, int] = {}
    for step in range(40):
        ends |= {output.request_id: step for output in engine.step() if output.finished}
    # The second batch begins when the longer one of the first has ended.
    assert ends == {"0": 1, "1": 8, "2": 10, "3": 10}
    continuous = Engine(ToyProgram(), block_size=4, num_blocks=64, max_num_seqs=2)
    for i, count in enumerate([2, 9, 2, 2]):
        continuous.submit([1, 2, i], SamplingParams(temperature=0, max_tokens=count), request_id=str(i))
    ends = {}
    for step in range(40):
        ends |= {output.request_id: step for output in continuous.step() if output.finished}
    assert ends == {"0": 1, "2": 3, "3": 5, "1": 8}
