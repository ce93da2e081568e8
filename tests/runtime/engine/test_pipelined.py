"""Steps of a pipeline: several are under way, a request is in one, and the tokens are those of one process."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.cache.block_copier import BlockCopier
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.engine.pipelined import PipelinedSteps
from torch_pagoda.runtime.parallel.group import GroupFailed
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram

PROMPTS = [[(7 * i + 3 * j) % 61 for j in range(length)] for i, length in enumerate((4, 37, 21, 9, 30))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def attention() -> ToyProgram:
    return ToyProgram(windows=(0, 8), dtype=torch.float64)


MADE = {"attention": attention, "state": ToyStateProgram}


class Copier(BlockCopier):
    """Makes the copies of the first stage when it is told of them, as a follower does."""

    def __init__(self, program: Piped, kv_cache: Any, host_cache: Any, groups: Any) -> None:
        super().__init__(kv_cache, host_cache, groups)
        like = [layer[0].shape[0] for layer in host_cache]
        other = allocate_kv_cache(program.caches, max(like), program.tokens) if like else []
        self._first = BlockCopier(program.first_cache, other, groups)

    def run(self, copies: Any) -> None:
        self._first.run(copies)
        super().run(copies)

    def start(self, copies: Any) -> None:
        self._first.run(copies)
        super().start(copies)


class Piped:
    """Two programs as stages: the first one runs a step when it begins, the last when it is finished. Both compute
    all, and their logits have to be the same.

    Attributes:
        most: steps that were under way at a time.
        fails_at: the step that ends the group.
    """

    def __init__(self, make: Any, num_stages: int = 2) -> None:
        self.num_stages = num_stages
        self._make, self._first, self._last = make, make(), make()
        self._begun: deque[Any] = deque()
        self.most, self.steps, self.fails_at = 0, 0, -1
        self.tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._last, name)

    def bind(self, kv_cache: Any) -> None:
        counts = [layer[0].shape[0] for layer in kv_cache]
        self.tokens = SETTINGS["block_size"]
        self.first_cache = allocate_kv_cache(self.caches, 1 + max(counts), self.tokens)
        self._first.bind(self.first_cache)
        self._last.bind(kv_cache)

    def copier(self, *arguments: Any) -> Copier:
        return Copier(self, *arguments)

    def begin(self, *step: Any) -> None:
        self.steps += 1
        if self.steps == self.fails_at:
            raise GroupFailed(1, "died")
        with torch.inference_mode():
            self._begun.append((step, self._first(*step)))
        self.most = max(self.most, len(self._begun))

    def finish(self) -> torch.Tensor:
        step, expected = self._begun.popleft()
        found = self._last(*step)
        assert torch.equal(found, expected), "the stages' caches differ"
        return found

    def drain(self) -> None:
        while self._begun:
            self.finish()

    def start_again(self) -> bool:
        self._begun.clear()
        return True

    def __call__(self, *step: Any) -> torch.Tensor:
        raise AssertionError("a step that is not launched")


def tokens(engine: Engine, params: SamplingParams = GREEDY, prompts: Any = PROMPTS) -> list[list[list[int]]]:
    outputs = engine.generate(prompts, params)
    assert not [completion.error for output in outputs for completion in output.outputs if completion.error]
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("toy", MADE)
@pytest.mark.parametrize("stages", [2, 3])
def test_tokens_are_those_of_one_process(toy: str, stages: int) -> None:
    program = Piped(MADE[toy], stages)
    engine = Engine(program, **SETTINGS)
    assert isinstance(engine._core.steps, PipelinedSteps)
    assert tokens(engine) == tokens(Engine(MADE[toy](), **SETTINGS))
    assert program.most == stages
    assert engine.stats()["steps_beside_others"]


@pytest.mark.parametrize("toy", MADE)
def test_all_modes_are_exact(toy: str) -> None:
    """Samples that part, beams, prompts that are found again, penalties and log-probabilities of prompts."""
    found = []
    for program in (Piped(MADE[toy]), MADE[toy]()):
        engine = Engine(program, **SETTINGS)
        drawn = SamplingParams(temperature=1.0, max_tokens=9, n=3, seed=3, ignore_eos=True, repetition_penalty=1.2)
        scored = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2, ignore_eos=True)
        beams = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
        outputs = engine.generate(PROMPTS, scored)
        found.append(
            [
                tokens(engine, drawn),
                [[tuple(s.token_ids) for s in o.sequences] for o in engine.beam_search(PROMPTS, beams)],
                tokens(engine),
                [[{k: v.logprob for k, v in (row or {}).items()} for row in o.prompt_logprobs] for o in outputs],
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("toy", MADE)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_few_blocks(toy: str, preemption: str) -> None:
    program = Piped(MADE[toy])
    small = {**SETTINGS, "num_blocks": 19, "preemption": preemption, "swap_space": 1 << 20}
    engine = Engine(program, **small, min_kv_cache_memory=8192 if toy == "attention" else 512)
    for pool in engine.block_manager.pools:
        if hasattr(pool, "patience"):
            pool.patience = 2
    expected = tokens(Engine(MADE[toy](), **SETTINGS))
    drawn, asked, found = random.Random(1), {}, {}
    for _ in range(40):
        i = drawn.randrange(len(PROMPTS))
        name = engine.submit(PROMPTS[i], GREEDY, priority=drawn.randrange(-1, 2))
        asked[name] = expected[i]
        for _ in range(drawn.choice([0, 0, 5, 40])):
            found |= {output.request_id: output for output in engine.step()}
        if drawn.random() < 0.3:
            engine.defragment()
        if drawn.random() < 0.2 and engine.cancel(name):
            del asked[name]
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    assert {name: [list(found[name].outputs[0].token_ids)] for name in asked} == asked
    assert engine.stats()["preemptions"]
    engine._core.state.batcher.check()


@pytest.mark.parametrize("at", [2, 9, 14])
def test_a_group_that_fails_computes_again(at: int) -> None:
    program = Piped(attention)
    program.fails_at = at
    assert tokens(Engine(program, **SETTINGS)) == tokens(Engine(attention(), **SETTINGS))


def test_an_interrupt_leaves_the_order_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Piped(attention)
    engine = Engine(program, **SETTINGS)
    for prompt in PROMPTS:
        engine.submit(prompt, GREEDY)
    for _ in range(6):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._core.steps, "update", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    found = {}
    while engine.has_unfinished():
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    assert list(dict(sorted(found.items(), key=lambda item: int(item[0].rpartition("-")[2] or 0))).values()) == [
        own[0] for own in tokens(Engine(attention(), **SETTINGS))
    ]


def test_no_sequence_waits_for_others_that_decode() -> None:
    """Each of the steps that are under way has its share of the sequences."""
    program = Piped(attention)
    engine = Engine(program, **{**SETTINGS, "max_num_seqs": 8})
    names = [engine.submit([i + 1, i + 2], GREEDY) for i in range(8)]
    seen: dict[str, int] = dict.fromkeys(names, 0)
    for _ in range(12):
        for output in engine.step():
            seen[output.request_id] = len(output.outputs[0].token_ids)
    assert max(seen.values()) - min(seen.values()) <= 1
