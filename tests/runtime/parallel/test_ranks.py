"""A program on several ranks, in real processes, behind an engine: the tokens are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import toy_ranks
from drafters import Oracle, draft

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.parallel.leader import LeaderProgram
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import VOCAB, ToyProgram

WINDOWS = (0, 8)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % VOCAB for j in range(length)] for i, length in enumerate((4, 37, 21, 9, 30))]


@pytest.fixture(scope="module")
def leader() -> Iterator[LeaderProgram]:
    program = toy_ranks.start(2, windows=WINDOWS)
    yield program
    program.close()


def engine(program: Any, **options: Any) -> Engine:
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
    return Engine(program, **settings)


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_those_of_one_process(leader, ahead):
    whole = ToyProgram(windows=WINDOWS, dtype=torch.float64)
    outputs = engine(leader, async_scheduling=ahead).generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == whole.dense_greedy(prompt, 12)


def test_drafts_of_the_leader_are_rows_of_all_ranks(leader):
    whole = ToyProgram(windows=WINDOWS, dtype=torch.float64)
    answers = {(tuple(prompt), None): whole.dense_greedy(prompt, 24) for prompt in PROMPTS}
    served = engine(leader)
    draft(served, Oracle(answers, 0.8, VOCAB), 3)
    for prompt, output in zip(PROMPTS, served.generate(PROMPTS, GREEDY), strict=True):
        assert list(output.outputs[0].token_ids) == answers[tuple(prompt), None][:12]
    assert served.stats()["spec_decode_num_accepted_tokens"]
    assert served.stats()["ranks"] == 2
