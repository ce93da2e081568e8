"""Graphs that GE refuses at their first step: which are dropped, and which errors are the caller's."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.compiler.targets.npu.ge.first_runs import FirstRuns
from torch_pagoda.runtime.npu_errors.device_lost import DeviceLost


class Graphs:
    """Graphs by key that raise ``error`` where it is set, when they are made or when they run."""

    def __init__(self, *, writes_state: bool = False, makes: bool = True) -> None:
        self.error: Exception | None = None
        self.makes, self.calls = makes, 0
        self.dropped: dict[int, str] = {}
        self.runs = FirstRuns(self.dropped.__setitem__, writes_state=writes_state)

    def graph(self, key: int) -> Any:
        if self.error is not None and not self.makes:
            raise self.error
        return self._run

    def _run(self, *args: Any) -> list[Any]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return [*args]


@pytest.mark.parametrize("makes", [True, False])
def test_one_that_never_ran_is_dropped(makes: bool) -> None:
    graphs = Graphs(makes=makes)
    graphs.error = RuntimeError("E40021: no\nand more")
    assert graphs.runs.attempt(4, graphs.graph, (1,)) is None
    assert graphs.dropped == {4: "it fails: E40021: no"}


@pytest.mark.parametrize("first", ["run", "attempt"])
def test_errors_of_one_that_has_run_are_raised(first: str) -> None:
    graphs = Graphs()
    assert getattr(graphs.runs, first)(4, graphs.graph, (1, 2)) == [1, 2]
    graphs.error = RuntimeError("later")
    with pytest.raises(RuntimeError, match="later"):
        graphs.runs.attempt(4, graphs.graph, (1,))
    assert not graphs.dropped
    for forget in (lambda: graphs.runs.forget(4), graphs.runs.clear):
        forget()
        assert graphs.runs.attempt(4, graphs.graph, (1,)) is None and graphs.dropped.pop(4)
        graphs.error = None
        assert graphs.runs.attempt(4, graphs.graph, (1,)) == [1]
        graphs.error = RuntimeError("again")


def test_a_step_that_may_have_written_over_a_state_is_not_run_again() -> None:
    graphs = Graphs(writes_state=True)
    graphs.error = RuntimeError("half-way")
    with pytest.raises(RuntimeError, match="half-way"):
        graphs.runs.attempt(4, graphs.graph, (1,))
    assert graphs.dropped == {4: "it fails: half-way"} and graphs.calls == 1
    graphs.makes = False  # nothing ran: nothing was written
    assert graphs.runs.attempt(2, graphs.graph, (1,)) is None and graphs.calls == 1


def test_a_lost_device_is_no_reason_to_go_on() -> None:
    graphs = Graphs()
    graphs.error = DeviceLost("507014")
    with pytest.raises(DeviceLost):
        graphs.runs.attempt(4, graphs.graph, (1,))
    assert not graphs.dropped
