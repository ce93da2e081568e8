"""What a selftest says of schedules that place nothing."""

from __future__ import annotations

import pytest

from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.npu_tools.selftest.graphs import _unscheduled
from torch_pagoda.passes import PassRecord

OPTIONS = CompileOptions(
    target="npu", codegen="aclgraph", soc="Ascend910B3", schedule={"streams": True, "prefetch": True}
)


@pytest.mark.parametrize(
    ("records", "silent"),
    [
        ([], ["streams", "prefetch"]),
        ([PassRecord("schedule_branches", matches=2)], ["prefetch"]),
        ([PassRecord("schedule_branches", matches=2), PassRecord("schedule_prefetch")], ["prefetch"]),
        ([PassRecord("schedule_branches", matches=1), PassRecord("schedule_prefetch", matches=1)], []),
    ],
)
def test_schedules_that_place_nothing_are_named(records: list[PassRecord], silent: list[str]) -> None:
    lines = _unscheduled(CompileReport("M", passes=records), OPTIONS)
    assert [line.split("'")[1] for line in lines] == silent
    assert all("matches nothing in this model on Ascend910B3" in line for line in lines)


def test_schedules_that_no_graph_can_follow_are_named() -> None:
    report = CompileReport("M", passes=[PassRecord("schedule_branches", matches=2)])
    report.dropped_schedules["streams"] = "x is wrong"
    first, second = _unscheduled(report, OPTIONS)
    assert first == "schedule 'streams' is left out: x is wrong" and "'prefetch' matches nothing" in second


def test_what_was_not_asked_for_is_not_named() -> None:
    assert _unscheduled(CompileReport("M"), CompileOptions(target="npu", codegen="aclgraph")) == []
