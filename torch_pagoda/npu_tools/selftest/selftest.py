"""Runs a test: its stages in order, the journal between them, and the report."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..doctor import System, examine
from .journal import FAILED, Journal, Outcome
from .report import Report, make_report
from .supervise import PREPARE, Stage, run_stage

__all__ = ["STAGES", "run_selftest", "stages_of"]

STAGES = ("device", "operators", "passes", "graphs", "ranks")
"""In order; the first describes model and device, and always runs. The last one needs several ranks."""
_FUNCTIONS = {
    "device": "torch_pagoda.npu_tools.selftest.model:stage",
    **{name: f"torch_pagoda.npu_tools.selftest.{name}:stage" for name in STAGES[1:]},
}
_VERSIONS = ("torch-pagoda", "torch", "torch-npu", "transformers")
JOURNAL = "journal.jsonl"


def stages_of(names: Sequence[str], ranks: int, *, simulated: bool = False) -> Sequence[str]:
    """The stages to run: those that are named, or by default what one rank, or several ones, can run.

    Args:
        names: of stages, or none.
        ranks: their number.
        simulated: on CPUs, where the other stages would compare the reference kernels with themselves.

    Raises:
        ValueError: a stage is unknown, or cannot be run so.
    """
    for name in names:
        if name not in STAGES:
            raise ValueError(f"stage {name!r} is unknown; use one of {', '.join(STAGES)}")
        if simulated and name not in ("device", "ranks"):
            raise ValueError(f"stage {name!r} needs an NPU; --simulate is for the stage ranks")
    if (simulated or "ranks" in names) and ranks < 2:
        raise ValueError("the stage ranks needs several of them; add -tp 2 or more")
    if names or simulated:
        return names or ("ranks",)
    return STAGES if ranks > 1 else STAGES[:-1]


def run_selftest(
    folder: Path,
    asked: dict[str, Any],
    *,
    stages: Sequence[str] = STAGES[:-1],
    seconds: float = 900.0,
    again: bool = False,
    show: Callable[[str, str], None] = lambda stage, item: None,
    system: System | None = None,
) -> Report:
    """Run the stages, and write report.json and report.html.

    Args:
        folder: folder of the journal and the reports; an unfinished test with the same parameters is continued.
        asked: fields of ``model.Asked``, as JSON data.
        stages: names from ``STAGES``.
        seconds: without a message, after which an item counts as hung.
        again: start over.
        show: called with the stage and the item that begins.
        system: the machine.

    Raises:
        ValueError: no device, an invalid ``asked``, or another run in the folder.
        OSError: the folder cannot be written to.
    """
    system = System() if system is None else system
    versions = {name: version for name in _VERSIONS if (version := system.version_of(name)) is not None}
    folder.mkdir(parents=True, exist_ok=True)
    subject = {"asked": asked, "stages": list(stages), "versions": versions}
    journal = Journal(folder / JOURNAL, subject, again=again)
    outcomes = {}
    finished = False
    try:
        for name in STAGES:
            if name == STAGES[0] or name in stages:
                outcomes[name] = run_stage(Stage(name, _FUNCTIONS[name], asked), journal, seconds, show)
            prepared = outcomes[STAGES[0]][0]
            if prepared.item == PREPARE:
                finished = True  # or the next run would take this failure from the journal
                if prepared.status == FAILED and len(outcomes[STAGES[0]]) == 1:
                    raise ValueError(prepared.reason)
                break  # there is no device to go on with
        report = _report(outcomes, asked, versions, journal.resumed, system)
        report.write_json(folder / "report.json")
        report.write_html(folder / "report.html")
        finished = True
    finally:
        journal.close(finished=finished)
    return report


def _report(
    outcomes: Mapping[str, Sequence[Outcome]],
    asked: Mapping[str, Any],
    versions: Mapping[str, str],
    resumed: bool,
    system: System,
) -> Report:
    now = datetime.datetime.now(datetime.UTC)
    shown = (
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "passes",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
    )
    return make_report(
        outcomes,
        facts={
            "when": now.strftime("%Y-%m-%d %H:%M UTC"),
            "versions": versions,
            "options": {name: asked[name] for name in shown if asked.get(name)},
            "doctor": [asdict(finding) for finding in examine(system)],
            "resumed": resumed,
        },
        secrets=_secrets(str(asked["model"])),
    )


def _secrets(model: str) -> dict[str, str]:
    """Spellings of the model's name, to redact."""
    names = {model, "models--" + model.replace("/", "--")}  # the latter in the cache of the hub
    with suppress(OSError, ValueError):
        path = Path(model).expanduser()
        names |= {str(path), str(path.absolute()), str(path.resolve())}
    return dict.fromkeys(names, "[model]")
