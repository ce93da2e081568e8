"""A device that is lost: every unfinished request ends with that error, and no other is taken; and warm-up first."""

from __future__ import annotations

from typing import Any

import pytest
from queued_device import QueuedProgram

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.npu_errors.device_lost import DeviceLost, lost_reason, raise_if_lost
from torch_pagoda.runtime.requests.beam_search_params import BeamSearchParams
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram

REPORTED = "NPU function error: c10_npu::acl, error code is 507010\n[Error]: ts lost heartbeat"
LOST = "the device is lost, its task scheduler does not respond"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_engine(scheduling: str, fails_at: int, message: str = REPORTED, **options: Any) -> tuple[Engine, ToyProgram]:
    """An engine whose device reports ``message`` at that step and from then on."""
    program = ToyProgram()

    def before_call(ids: Any) -> None:
        if len(program.steps) >= fails_at:
            raise RuntimeError(message)

    program.before_call = before_call
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 2, **options}
    return Engine(QueuedProgram(program) if scheduling == "ahead" else program, **settings), program


@pytest.mark.parametrize(
    "message",
    [
        REPORTED,
        "device lost",
        "The device is lost (EL0005)",
        "HBM MULTI BIT ECC ERROR. time is 3, error code is 507054",
        "rtMalloc failed, errorCode=507053",
        "UCE ERROR.",
        "[Error]: hdc disconnect, ret=507901",
    ],
)
def test_what_says_that_a_device_is_lost(message):
    reason = lost_reason(RuntimeError(message))
    assert reason is not None and reason.startswith("the device is lost") and "npu-smi" in reason
    with pytest.raises(DeviceLost) as raised:
        raise_if_lost(RuntimeError(message))
    assert lost_reason(raised.value) == reason, "said once"
    outer = ValueError("the step failed")
    outer.__cause__ = RuntimeError(message)
    assert lost_reason(outer) == reason


@pytest.mark.parametrize(
    "message",
    [
        "stream resources are insufficient, error code is 207008",
        "aicore exception, error code is 507015",
        "a prompt of 507010 tokens",
        "the devices lost packets",
        "",
    ],
)
def test_other_errors_say_no_such_thing(message):
    assert lost_reason(RuntimeError(message)) is None
    raise_if_lost(RuntimeError(message))


def test_every_unfinished_request_ends_with_it(scheduling):
    engine, program = make_engine(scheduling, 3)
    names = [engine.submit([i, i + 1, i + 2], GREEDY) for i in range(5)]  # two run, three wait
    outputs: dict[str, Any] = {}
    while engine.has_unfinished():
        outputs.update({output.request_id: output for output in engine.step()})
    assert set(outputs) == set(names)
    for output in outputs.values():
        (completion,) = output.outputs
        assert output.finished and completion.finish_reason == "error" and completion.error.startswith(LOST)
    assert len(outputs[names[0]].outputs[0].token_ids) >= 1, "what was settled is kept"
    calls = len(program.steps)
    assert engine.device_lost is not None and engine.device_lost.startswith(LOST)
    assert engine.block_manager.num_used_blocks == 0 and not engine.has_unfinished()
    with pytest.raises(DeviceLost, match=LOST):
        engine.submit([1, 2], GREEDY)
    assert len(program.steps) == calls and engine.step() == []


def test_followers_and_beams_end_with_it(scheduling):
    engine, _ = make_engine(scheduling, 2)
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(n=3, seed=1, max_tokens=8))
    assert all(c.finish_reason == "error" and c.error.startswith(LOST) for c in output.outputs)
    engine, _ = make_engine(scheduling, 2)
    (found,) = engine.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=2, max_tokens=8))
    assert found.error is not None and found.error.startswith(LOST)


def test_another_error_ends_culprits_alone(scheduling):
    engine, program = make_engine(scheduling, 3, "aicore exception, error code is 507015")
    outputs = engine.generate([[1, 2, 3], [4, 5, 6]], GREEDY)
    assert all("the model step failed with" in output.outputs[0].error for output in outputs)
    program.before_call = None
    assert engine.device_lost is None
    assert engine.generate([[1, 2, 3]], GREEDY)[0].outputs[0].finish_reason == "length"


class WarmingProgram(ToyProgram):
    """Notes when it is warmed up, and may fail then."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error
        self.warmed = 0

    def warm_up(self) -> None:
        assert self._kv_cache, "caches are bound before"
        self.warmed += 1
        if self.error is not None:
            raise self.error

    def graph_stats(self) -> dict[str, int]:
        return {"graph_sizes": 3}


def test_an_engine_is_warm_when_it_is_made(scheduling):
    """So the server, which says hello when it has one, is not healthy before."""
    program = WarmingProgram()
    engine = Engine(program, block_size=4, num_blocks=8)
    assert program.warmed == 1 and not program.steps
    assert engine.stats()["graph_sizes"] == 3 and engine.stats()["blocks_used"] == 0
    assert Engine(WarmingProgram(), block_size=4, num_blocks=8, npu_warmup="lazy").runner.program.warmed == 0


def test_a_device_that_is_lost_in_warm_up_ends_the_start(scheduling):
    with pytest.raises(DeviceLost, match="gone"):
        Engine(WarmingProgram(DeviceLost("gone")), block_size=4, num_blocks=8)
