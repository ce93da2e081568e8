"""The engine and captured graphs on a device that computes behind the host: a CUDA device, or a stand-in for one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from late_device import late_device
from toy_captures import BLOCK_SIZE, CYCLES, SleepingProgram, Spoil, ToyCaptures

from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.route import Route
from torch_pagoda.runtime.device_queue import DeviceQueue, HostCopy
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.engine.look_ahead import LookAhead
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), list(range(1, 11)), [59, 60]]
DRAWN: list[dict[str, Any]] = [
    *({"temperature": 0}, {"seed": 3}, {"seed": 4, "top_k": 5}, {"temperature": 0}, {"seed": 6, "top_p": 0.8}),
]
PARAMS = [SamplingParams(max_tokens=6 + i, **drawn) for i, drawn in enumerate(DRAWN)]
Completed = list[tuple[list[int], str | None]]


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "stand-in":
        with late_device() as device:
            yield device
        return
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()


def engine_of(route: ToyCaptures, *, ahead: bool = True, **options: Any) -> Engine:
    settings: dict[str, Any] = {"num_blocks": 48, "max_num_seqs": 4, "max_num_batched_tokens": 19, **options}
    return Engine(SleepingProgram(route), block_size=BLOCK_SIZE, async_scheduling=ahead, **settings)


def complete(engine: Engine) -> Completed:
    return [(o.outputs[0].token_ids, o.outputs[0].error) for o in engine.generate(PROMPTS, PARAMS)]


@cache
def synchronous(device: torch.device) -> Completed:
    """What comes of steps that are settled before the next is planned, operator by operator."""
    engine = engine_of(ToyCaptures(device, 0), ahead=False)
    found = complete(engine)
    assert not any(behind_in(engine)) and not any(error for _, error in found)
    return found


def behind_in(engine: Engine) -> list[bool]:
    program = engine.runner.program
    assert isinstance(program, SleepingProgram)
    return program.was_behind


def sizes_of(route: ToyCaptures) -> set[int]:
    return {tokens for tokens, _ in route.captured}


def test_copies_wait_for_nothing_and_are_waited_for(device: torch.device) -> None:
    queue, module = DeviceQueue(device), torch.get_device_module(device)
    numbers, slept = torch.arange(1000), module.Event()
    for _ in range(2):  # the first time libraries are loaded and memory is pinned, which may wait
        module._sleep(CYCLES)
        copies = [queue.read_later(queue.send(numbers + i) * 2) for i in range(20)]  # pinned memory is freed at once
        slept.record()
        behind = not slept.query()
        assert all(torch.equal(copy.wait(), (numbers + i) * 2) for i, copy in enumerate(copies))
    assert behind


@pytest.mark.parametrize("budget", [0, 4], ids=["operators", "captures"])
def test_tokens_are_those_of_synchronous_steps(device: torch.device, budget: int) -> None:
    want = synchronous(device)
    route = ToyCaptures(device, budget)
    engine = engine_of(route)
    assert complete(engine) == want
    behind, stats = behind_in(engine), engine.stats()
    assert sum(behind) > len(behind) / 2, "the host runs ahead"
    assert stats["steps_ahead"] > len(behind) / 2
    assert (stats["graph_sizes"], stats["graph_sizes_dropped"]) == (budget, 0) and len(sizes_of(route)) == budget
    assert budget == 0 or stats["operator_steps"] == 0


def read_without_waiting(patch: pytest.MonkeyPatch, device: torch.device) -> None:
    patch.setattr(HostCopy, "wait", lambda self: self._values)


def reuse_pinned_memory(patch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What a step sends goes through the pinned memory of the step before."""
    pinned: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def on_device(self: Route, args: Sequence[Any]) -> list[Any]:
        moved = list(args)
        for i in self.changing:
            if moved[i].device.type == "cpu":
                key = (i, moved[i].shape)
                place = pinned.setdefault(key, torch.empty(moved[i].shape, dtype=moved[i].dtype, pin_memory=True))
                moved[i] = place.copy_(moved[i]).to(device, non_blocking=True)
        return moved

    patch.setattr(Route, "on_device", on_device)


def on_another_stream(patch: pytest.MonkeyPatch, device: torch.device, owner: type, name: str) -> None:
    right, module = getattr(owner, name), torch.get_device_module(device)

    def unordered(*args: Any) -> Any:
        with module.stream(module.Stream()):
            return right(*args)

    patch.setattr(owner, name, unordered)


def write_static_buffers_early(patch: pytest.MonkeyPatch, device: torch.device) -> None:
    on_another_stream(patch, device, AclGraphs, "_in_place")


def insert_sampled_ids_early(patch: pytest.MonkeyPatch, device: torch.device) -> None:
    on_another_stream(patch, device, LookAhead, "_with_sampled")


@pytest.mark.parametrize(
    ("mutant", "budget"),
    [
        (read_without_waiting, 0),
        (reuse_pinned_memory, 0),
        (write_static_buffers_early, 4),
        (insert_sampled_ids_early, 0),
    ],
)
def test_mistakes_are_seen(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch, torch.device], None],
    budget: int,
) -> None:
    want = synchronous(device)
    engine = engine_of(ToyCaptures(device, budget))
    mutant(monkeypatch, device)
    assert complete(engine) != want


def raising(logits: torch.Tensor, caches: Sequence[torch.Tensor]) -> torch.Tensor:
    raise RuntimeError("it ends half-way")


def without_memory(logits: torch.Tensor, caches: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(2**50, dtype=torch.uint8, device=logits.device)


def writing_outside(logits: torch.Tensor, caches: Sequence[torch.Tensor]) -> torch.Tensor:
    caches[0][3].fill_(1.0)
    return logits


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda logits, caches: logits * 1.5, "its logits differ"),
        (writing_outside, r"it writes into key_cache_0\[3\]"),
        (raising, "it fails: it ends half-way"),
        (without_memory, "it fails: .*out of memory"),
    ],
    ids=["numbers", "writes", "raises", "memory"],
)
def test_a_spoilt_capture_is_dropped(device: torch.device, spoil: Spoil, reason: str) -> None:
    want = synchronous(device)
    route = ToyCaptures(device, 4)
    route.spoilt[4] = spoil
    engine = engine_of(route)
    assert list(route.dropped) == [4] and re.match(reason, route.dropped[4])
    assert complete(engine) == want
    stats = engine.stats()
    assert (stats["graph_sizes"], stats["graph_sizes_dropped"], stats["operator_steps"]) == (3, 1, 0)


def test_memory_that_ends_while_requests_run(device: torch.device) -> None:
    want = synchronous(device)
    route = ToyCaptures(device, 4)
    route.spoilt[4] = without_memory
    engine = engine_of(route, npu_warmup="lazy")
    assert complete(engine) == want
    assert sizes_of(route) and 4 not in sizes_of(route) and not route.dropped
    (reason,) = route.eager_steps
    assert re.match("it fails: .*out of memory", reason)


def test_caches_at_another_address_are_captured_anew(device: torch.device) -> None:
    want = synchronous(device)
    route = ToyCaptures(device, 4)
    for captures in (4, 8):
        assert complete(engine_of(route)) == want
        assert len(route.graphs) == captures
