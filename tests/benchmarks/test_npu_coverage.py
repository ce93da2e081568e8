"""What ``coverage.py --target npu`` writes down of an architecture."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from npu_coverage import NpuRow, npu_tables


@pytest.mark.parametrize(
    ("launches", "cell"),
    [
        ({}, "not converted"),
        ({"launches": (None, 9)}, "not counted → 9"),
        ({"launches": (30, 9)}, "30 → 9"),
    ],
    ids=["nothing", "after", "both"],
)
def test_what_was_not_reached_is_no_zero(launches: dict[str, Any], cell: str) -> None:
    # A row comes out of another process as JSON, where a tuple becomes a list.
    row = NpuRow(**json.loads(json.dumps(dataclasses.asdict(NpuRow("model", **launches)))))
    line = next(line for line in npu_tables([row]).splitlines() if line.startswith("| model "))
    assert f"| {cell} |" in line and "| 0 → 0 |" not in line


def test_a_pass_that_is_not_right_is_named_and_the_model_not_clean() -> None:
    row = NpuRow("model", dropped=[("lower_npu_states", "over large weights logits differ")])
    assert not row.clean and NpuRow("model").clean
    text = npu_tables([row, NpuRow("other")])
    assert "- model: lower_npu_states: over large weights logits differ" in text
    assert "1 leave nothing in ATen" in text and "1 lose a pass that is not right" in text
