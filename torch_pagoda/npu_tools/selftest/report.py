"""The report of a test as JSON data, redacted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .answers import answers
from .journal import RIGHT, Outcome
from .redact import redacted

__all__ = ["FORMAT", "Report", "make_report"]

FORMAT = 1


@dataclass(frozen=True)
class Report:
    """The report of a test.

    Attributes:
        data: all findings, redacted; see ``make_report``.
    """

    data: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What was tested; a missing device is stated first."""
        architecture = self.data["model"].get("architecture", "a model")
        if self.data["stand_in"]:
            return f"No Ascend device was used: selftest of {architecture} on a stand-in"
        return f"Selftest of {self.data['device'].get('device', 'a device')} on {architecture}"

    @property
    def first_line(self) -> str:
        """The first line of the report."""
        if self.data["stand_in"]:
            return (
                f"No Ascend device was used: {self.data['stand_in']}. No result in here applies to a device, and "
                "the times are not those of a device."
            )
        return (
            f"Run on {self.data['device'].get('device', 'a device that could not be opened')}, {self.data['when']}."
        )

    @property
    def verdict(self) -> str:
        """The first failure, or that everything is right."""
        first = self.data["first_wrong"]
        if first is None:
            return f"all {self.data['counts'].get(RIGHT, 0)} items that ran are right"
        return f"first failure, in stage {first['stage']}: {first['item']}: {first['status']}, {first['reason']}"

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong, failed, crashed, hung or left out."""
        return self.data["first_wrong"] is None

    def write_json(self, path: Path) -> None:
        """Write the report as JSON."""
        _write(path, json.dumps(self.data, indent=1, allow_nan=False) + "\n")

    def write_html(self, path: Path) -> None:
        """Write the self-contained page."""
        from .page import page

        _write(path, page(self))


def make_report(
    stages: Mapping[str, Sequence[Outcome]],
    *,
    facts: Mapping[str, Any],
    secrets: Mapping[str, str],
) -> Report:
    """Make the report from outcomes.

    Args:
        stages: stage → its outcomes, in the order of the run.
        facts: further facts: "when", "versions", "options", "doctor", "resumed".
        secrets: see ``redact.redacted``.
    """
    data: dict[str, list[dict[str, Any]]] = {
        name: [asdict(outcome) for outcome in outcomes] for name, outcomes in stages.items()
    }
    found = {outcome["item"]: outcome["found"] for outcome in data.get("device", [])}
    every = [(name, outcome) for name, outcomes in data.items() for outcome in outcomes]
    wrong = next(((name, outcome) for name, outcome in every if outcome["status"] != RIGHT), None)
    counts: dict[str, int] = {}
    for _, outcome in every:
        counts[outcome["status"]] = counts.get(outcome["status"], 0) + 1
    return Report(
        redacted(
            {
                "format": FORMAT,
                "stand_in": found.get("device", {}).get("stand_in", ""),
                "first_wrong": None
                if wrong is None
                else {"stage": wrong[0], **{name: wrong[1][name] for name in ("item", "status", "reason")}},
                "counts": counts,
                "device": found.get("device", {}).get("facts", {}),
                "model": found.get("model", {}).get("facts", {}),
                **facts,
                "answers": answers(data),
                "stages": data,
            },
            secrets,
        )
    )


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
