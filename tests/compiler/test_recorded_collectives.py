"""Steps that several ranks run are replayed with their collectives, and never run again once they have begun."""

from __future__ import annotations

import pytest
import torch
from rank_processes import ranks
from recorded_ranks import counted_steps, counts, layers, replay_steps

from torch_pagoda.compiler.targets.cpu.recorded_step import _Step
from torch_pagoda.runtime.ops.collectives import GROUP, drop_group, set_group
from torch_pagoda.runtime.ops.kernel_check import _arguments
from torch_pagoda.runtime.ops.native import load_kernels
from torch_pagoda.runtime.parallel.group import GroupFailed
from torch_pagoda.runtime.parallel.shared_group import SharedGroup

pagoda = torch.ops.pagoda
pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ kernels, no records")


@pytest.fixture
def group(tmp_path):
    """Of this process alone."""
    group = SharedGroup.create(tmp_path, 1)
    group.meet()
    set_group(group)
    yield group
    drop_group(GROUP)
    group.close()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_replay_steps_together(tmp_path, size):
    with ranks(tmp_path, size, replay_steps, 12, -1) as running:
        (first, counted), *others = running.answers()
    assert counted == {"graph": 1, "replay": 10}
    for found, same in others:
        assert same == counted and found == first


def test_a_rank_that_dies_is_named_by_a_replayed_step(tmp_path):
    with ranks(tmp_path, 2, replay_steps, 12, 7) as running:
        culprit, said = running.answer(0)
    assert culprit == 1 and "ended before exchange" in said


def test_collectives_are_noted_and_repeated_in_one_part(group):
    steps, weight = counted_steps(layers(1, 3)), torch.rand(64)
    for _ in range(4):
        (found,) = steps([torch.ones(1, 64), weight])
    assert counts["graph"] == 1
    (step,) = steps._steps.values()
    assert len(step._parts) == 1
    assert torch.equal(found, steps._calls(torch.ones(1, 64), weight)[0])


def test_a_failed_replay_raises_and_the_graph_is_not_run(group):
    steps, weight = counted_steps(layers(1, 2)), torch.rand(64)
    for _ in range(3):
        steps([torch.ones(1, 64), weight])
    group.stop("another rank is broken")
    with pytest.raises(GroupFailed, match="another rank is broken") as raised:
        steps([torch.ones(1, 64), weight])
    assert raised.value.rank == 0 and counts["graph"] == 1


@pytest.mark.parametrize("collective", [True, False])
def test_a_step_whose_kernel_refuses_is_not_run_again(group, collective):
    """On one rank alone it would wait for sums that the others don't make; without collectives it says why."""

    def build(graph):
        given = [graph.placeholder(name) for name in ("query", "key", "value", "keys", "values", "slots", *"tsl")]
        query, *others = given
        if collective:
            query = graph.call_function(pagoda.all_reduce.default, (query, GROUP))
        settings = (None, None, 0.125, 0, 0, 0.0)
        graph.output((graph.call_function(pagoda.paged_attention.default, (query, *others, *settings)),))

    steps, given = counted_steps(build, (0, 1, 2, 5, 6, 7, 8)), list(_arguments(torch.float32, 0)[:9])
    for _ in range(3):
        (found,) = steps(given)
        expected = found.clone()
    assert counts["graph"] == 1
    wrong = [*given[:5], torch.full_like(given[5], 1 << 40), *given[6:]]
    if collective:
        with pytest.raises(RuntimeError, match="a kernel refused its arguments in a step that several ranks run"):
            steps(wrong)
        assert counts["graph"] == 1
    else:
        with pytest.raises(ValueError, match=r"slot_mapping\[0\] is"):
            steps(wrong)
        assert counts["graph"] == 2
    assert torch.equal(steps(given)[0], expected)


def test_another_group_of_the_name_is_recorded_anew(group, tmp_path, monkeypatch):
    replays, original = [], _Step.replay
    monkeypatch.setattr(_Step, "replay", lambda self, args: replays.append(self) or original(self, args))
    steps, weight = counted_steps(layers(1, 2)), torch.rand(64)
    for _ in range(3):
        (found,) = steps([torch.ones(1, 64), weight])
        expected = found.clone()
    group.close()
    second = SharedGroup.create(tmp_path, 1, slot_bytes=1 << 16)
    second.meet()
    set_group(second)
    for _ in range(3):
        assert torch.equal(steps([torch.ones(1, 64), weight])[0], expected)
    assert len(set(map(id, replays))) == 2 and counts["graph"] == 2
    second.close()
