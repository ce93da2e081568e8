"""``pagoda npu selftest``: tests an Ascend device with a model, and reports."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .errors import one_line_errors

if TYPE_CHECKING:
    from ..npu_tools.selftest import Report

NOT_RIGHT = 1


def selftest(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or hub id.", metavar="MODEL")],
    out: Annotated[Path, typer.Option(help="Where the journal and both reports go.", metavar="FOLDER")] = Path(
        "pagoda-selftest"
    ),
    stage: Annotated[
        list[str] | None, typer.Option(help="Only operators, passes, graphs or ranks; repeatable.", metavar="NAME")
    ] = None,
    comparison: Annotated[
        list[str] | None,
        typer.Option(help="Of graphs only this one, see docs/npu.md; repeatable.", metavar="NAME"),
    ] = None,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", "-tp", help="Test so many NPUs together, too: the stage ranks.", metavar="N"
        ),
    ] = 1,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Run the stage ranks on CPUs, with reference kernels; needs no NPU."),
    ] = False,
    timeout: Annotated[
        int, typer.Option(help="Without a word for so long, an item counts as hung.", metavar="SECONDS")
    ] = 900,
    again: Annotated[bool, typer.Option("--again", help="Begin anew, not behind an unfinished run.")] = False,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences of the engines.", metavar="N")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a step.", metavar="N")] = 2048,
    block_size: Annotated[int, typer.Option(help="Tokens per block of the cache.", metavar="N")] = 128,
    quantization: Annotated[
        str | None, typer.Option(help="int8, int8-weight-only or int4-weight-only.", metavar="NAME")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto, or int8, whose decode steps have a graph of their own.", metavar="NAME")
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", metavar="NAME")] = "auto",
    skip_pass: Annotated[
        list[str] | None, typer.Option(help="Leave this pass out; repeatable.", metavar="NAME")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Compare a model on an NPU with the CPU, operator by operator and pass by pass; check planned graphs and
    time ways to run them.

    Each operator of the model's graphs at its real sizes; the model, pass by pass; each planned graph of each way to
    run it, and how fast that is. With several ranks, what they exchange and serve together, and that they end when
    one of them does. An error, a hang or a lost device is noted, and the rest goes on. Where this process
    ends, the next run goes on behind what was under way. report.json and report.html hold no prompts or
    texts; folders, the user, the host and the model's name are taken out, so that they can be sent to somebody who
    has no NPU.

    Run pagoda npu doctor first. Exit status: 0, 1 when something is not right, 2 for a mistake or no NPU.
    """
    with one_line_errors(debug):
        from ..npu_tools.selftest.comparisons import chosen
        from ..npu_tools.selftest.selftest import stages_of
        from ..runtime.requests.checks import check_at_least

        chosen(comparison or [])  # raises for what it does not know
        check_at_least(
            1,
            "raise it",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            timeout=timeout,
            tensor_parallel_size=tensor_parallel_size,
        )
        stages = stages_of(stage or [], tensor_parallel_size, simulated=simulate)
        asked = {
            "model": model,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "passes": {"skip": skip_pass} if skip_pass else None,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "comparisons": comparison or [],
            "tensor_parallel_size": tensor_parallel_size,
        }
        if simulate:
            asked["device"] = "torch_pagoda.npu_tools.selftest.device:simulated"
        report = run_and_write(asked, out, stages, timeout, again)
    raise typer.Exit(0 if report.is_right else NOT_RIGHT)


def run_and_write(asked: dict[str, Any], out: Path, stages: Sequence[str], timeout: float, again: bool) -> Report:
    """Run the test, write both reports, and print their beginning."""
    from ..npu_tools.selftest import run_selftest

    progress = _Progress()
    # What is under way when somebody ends this process is tried again by the next run, as with Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    report = run_selftest(out, asked, stages=stages, seconds=timeout, again=again, show=progress.show)
    console = Console(highlight=False)
    console.print(Text(report.title, style="bold"))
    console.print(Text(report.first_line))
    for section in _shown(report):
        console.print(section)
    console.print(Text(report.verdict, style="green" if report.is_right else "red"))
    for name in ("report.json", "report.html"):
        typer.echo(f"written: {out / name}", err=True)
    return report


def _shown(report: Report) -> list[Any]:
    from ..npu_tools.selftest.page import sections
    from ..rendering.terminal import section_tables

    return [part for section in sections(report.data, short=True) for part in section_tables(section)]


class _Progress:
    """Lines on stderr: each stage when it begins, and its items if stderr is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._stage, self._count = "", 0
        self._began = time.perf_counter()

    def show(self, stage: str, item: str) -> None:
        """An item begins."""
        if stage != self._stage:
            self._stage, self._count = stage, 0
            self._console.print(Text(f"{time.perf_counter() - self._began:7.1f} s  {stage}"))
        self._count += 1
        if sys.stderr.isatty():
            width = max(20, self._console.width - 14)
            self._console.print(Text(f"{self._count:9d}  {item}"[:width], style="dim"))
