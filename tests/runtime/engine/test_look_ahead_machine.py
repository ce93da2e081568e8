"""Random traffic through engines of both modes: requests get the tokens that they get alone, and the books hold."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from queued_device import QueuedProgram
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.batching import snapshots
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.engine.look_ahead import LookAhead
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram

STEM = [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 5, "top_p": 0.9},
    "cut": {"seed": 6, "top_k": 4, "temperature": 1.5},
    "two": {"seed": 7, "n": 2},
    "penalized": {"temperature": 0, "presence_penalty": 1.5},
    "reported": {"temperature": 0, "logprobs": 1},
    "scored": {"temperature": 0, "prompt_logprobs": 0},
}
PROGRAMS: dict[str, Any] = {
    "full": lambda: ToyProgram(dtype=torch.float64),
    "windows": lambda: ToyProgram(windows=(0, 6), dtype=torch.float64),
    "hybrid": ToyStateProgram,
    "state": lambda: ToyStateProgram(with_kv=False),
}
SIZES: dict[str, dict[str, Any]] = {
    "ample": {"num_blocks": 64},
    "tight": {"num_blocks": 15, "max_num_batched_tokens": 9},
    "swapping": {"num_blocks": 15, "swap_space": 1 << 15, "preemption": "swap", "max_num_batched_tokens": 16},
}


@cache
def alone(program: str, prompt: tuple[int, ...], kind: str, max_tokens: int, stop: int | None) -> list[Any]:
    """What a request gives by itself, with every step settled before the next."""
    engine = Engine(PROGRAMS[program](), block_size=4, num_blocks=64, max_model_len=56)
    return ends(engine.generate([list(prompt)], params_of(kind, max_tokens, stop))[0])


def params_of(kind: str, max_tokens: int, stop: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=[] if stop is None else [stop], **PARAMS[kind])


def ends(output: RequestOutput) -> list[Any]:
    return [(c.token_ids, c.finish_reason, c.stop_reason, len(c.logprobs or ())) for c in output.outputs]


class LookAheadMachine(RuleBasedStateMachine):
    """Prompts, cancels, failures and interrupts between the steps of an engine."""

    @initialize(
        program=st.sampled_from(sorted(PROGRAMS)),
        sizes=st.sampled_from(sorted(SIZES)),
        ahead=st.sampled_from([True, True, True, False]),
        caching=st.booleans(),
    )
    def start(self, program: str, sizes: str, ahead: bool, caching: bool) -> None:
        snapshots.WORTH = 8  # type: ignore[misc]
        self.kind, self.ahead = program, ahead
        self.toy = PROGRAMS[program]()
        self.failure: BaseException | None = None
        self.toy.before_call = self.fail
        options: dict[str, Any] = {**SIZES[sizes], "enable_prefix_caching": caching, "async_scheduling": ahead}
        ran = QueuedProgram(self.toy) if ahead else self.toy
        self.engine = Engine(ran, block_size=4, max_num_seqs=4, max_model_len=56, **options)
        self.asked: dict[str, tuple[Any, ...]] = {}
        self.cancelled: set[str] = set()
        self.finished: dict[str, RequestOutput] = {}

    def fail(self, ids: torch.Tensor) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    @rule(
        stem=st.integers(0, len(STEM)),
        rest=st.lists(st.integers(1, 4), min_size=1, max_size=24),
        kind=st.sampled_from(sorted(PARAMS)),
        max_tokens=st.integers(1, 18),
        stops=st.sampled_from([None, None, 1, 3, 6]),
    )
    def submit(self, stem: int, rest: list[int], kind: str, max_tokens: int, stops: int | None) -> None:
        prompt = (*STEM[:stem], *rest)
        stop = None
        if stops is not None:  # by a token that comes
            tokens = alone(self.kind, prompt, kind, max_tokens, None)[0][0]
            stop = tokens[min(stops, len(tokens) - 1)]
        name = self.engine.submit(list(prompt), params_of(kind, max_tokens, stop))
        self.asked[name] = (prompt, kind, max_tokens, stop)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            want = alone(self.kind, *self.asked[output.request_id])
            for completion, own in zip(output.outputs, want, strict=True):
                assert completion.token_ids == own[0][: len(completion.token_ids)], "another token, or one too many"
            if output.finished:
                assert output.request_id not in self.finished
                self.finished[output.request_id] = output

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        name = sorted(self.asked)[which % len(self.asked)]
        if self.engine.cancel(name):
            self.cancelled.add(name)

    @precondition(lambda self: self.engine.has_unfinished())
    @rule()
    def interrupted_step(self) -> None:
        """Ctrl-C in the host's part of a step."""
        runner = self.engine.runner
        runner.pack = self.interrupt  # type: ignore[method-assign]
        try:
            self.take(self.engine.step())
        except KeyboardInterrupt:
            pass
        finally:
            del runner.pack  # type: ignore[method-assign]

    def interrupt(self, scheduled: Any) -> Any:
        raise KeyboardInterrupt

    @precondition(lambda self: self.engine.has_unfinished())
    @rule()
    def failing_step(self) -> None:
        """The model raises once in a step of several requests, on the device where there is one: all are computed
        again, each by itself, and nobody ends by it. Whoever fails by itself does."""
        runner = self.engine.runner
        pack = runner.pack
        several: list[Any] = []

        def failing(scheduled: Any) -> Any:
            if len(scheduled) > 1 and not several:
                if self.ahead:  # or the step before it would fail
                    self.toy_queue().synchronize_quietly()
                several.append(scheduled)
                self.failure = RuntimeError("once")
            return pack(scheduled)

        runner.pack = failing  # type: ignore[method-assign]
        try:
            self.step(1)
        finally:
            del runner.pack  # type: ignore[method-assign]
        if self.ahead:
            self.toy_queue().synchronize_quietly()
        self.failure = None
        if self.ahead and several:
            if self.engine._core.steps.is_under_way:  # it is noticed now
                self.step(1)
            self.toy.mistakes = []  # what was behind it read states that were never written, and counts for nothing

    def toy_queue(self) -> Any:
        return self.engine.runner.program.queue  # type: ignore[attr-defined]

    @rule(what=st.sampled_from(["reset_prefix_cache", "defragment", "stats", "compute_again"]))
    def beside(self, what: str) -> None:
        if what == "compute_again":
            self.engine.in_turn(self.engine.compute_again)
        else:
            getattr(self.engine, what)()

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.batcher.check()
        assert getattr(self.toy, "mistakes", []) == []
        assert isinstance(self.engine._core.steps, LookAhead) == self.ahead
        assert self.engine.block_manager.held == [] or self.engine._core.steps.is_under_way
        for request in self.engine.batcher.running:
            assert request.num_output_placeholders <= self.engine._core.steps.is_under_way
            assert request.num_computed_tokens <= request.num_tokens_with_placeholders <= 56

    def teardown(self) -> None:
        snapshots.WORTH = 64  # type: ignore[misc]
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_unfinished():
                break
            self.take(self.engine.step())
        assert self.finished.keys() == self.asked.keys()
        for name, output in self.finished.items():
            if name in self.cancelled:
                continue
            assert ends(output) == alone(self.kind, *self.asked[name])
        assert not self.engine._core.steps.is_under_way
        self.engine.block_manager.finish_copies()
        assert self.engine.block_manager.num_used_blocks == 0


TestLookAheadMachine = LookAheadMachine.TestCase
TestLookAheadMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestLongLookAheadMachine(LookAheadMachine.TestCase):  # type: ignore[name-defined, misc]
    """Many more examples."""

    settings = settings(
        max_examples=1500, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
