"""``pagoda bench``: starts, latency and throughput of a model on this machine, with options as in ``vllm bench``."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ..runtime.option import option
from .engine_options import ENGINE_PANELS, LLM_OPTIONS, EngineCommandOptions
from .errors import one_line_errors
from .number_table import number_table
from .phases import show_phases
from .with_options import Model, with_options

if TYPE_CHECKING:
    from ..llm import LLM
    from ..reports.machine_limits import MachineLimits

app = typer.Typer(
    name="bench",
    help=(
        "Measure starts, latency and throughput of a model on this machine."
        "\n\n"
        "latency and throughput also measure how fast the machine reads memory and multiplies matrices, and show the "
        "share that the model reaches."
    ),
    no_args_is_help=True,
)

_PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True)
class BenchOptions(EngineCommandOptions):
    """Options of all benchmarks, in addition to the keyword arguments of ``LLM``."""

    output_json: Path | None = option(None, "Write the figures there.", metavar="FILE")


@dataclass(frozen=True)
class StartupOptions(BenchOptions):
    """Options of ``pagoda bench startup``."""

    num_iters_cold: int = option(1, "Starts with an empty cache, which compile kernels and model.")
    num_iters_warm: int = option(3, "Starts with the program and kernels in the cache.")


@dataclass(frozen=True)
class PromptOptions(BenchOptions):
    """Options of benchmarks with random prompts, which all batches share."""

    seed: int = option(0, "Seed of the random prompts.")
    enable_prefix_caching: bool | None = option(None, "Reuse the prompts of earlier batches.")


@dataclass(frozen=True)
class LatencyOptions(PromptOptions):
    """Options of ``pagoda bench latency``."""

    input_len: int = option(32, "Tokens of each prompt.")
    output_len: int = option(128, "Tokens to generate for each prompt.")
    batch_size: int = option(8, "Prompts at the same time.")
    num_iters_warmup: int = option(2, "Batches that do not count.")
    num_iters: int = option(10, "Batches that count.")


@dataclass(frozen=True)
class ThroughputOptions(PromptOptions):
    """Options of ``pagoda bench throughput``."""

    input_len: int = option(512, "Tokens of each prompt.")
    output_len: int = option(128, "Tokens to generate for each prompt.")
    num_prompts: int = option(32, "Prompts, all submitted at once.")


def _panels(own: str, others: str = "seed output_json verbose debug") -> Sequence[tuple[str, str]]:
    return ("", own), *ENGINE_PANELS, ("", others)


@app.command(epilog="Example:  pagoda bench startup ./my-model")
@with_options(StartupOptions, _panels("num_iters_cold num_iters_warm", "output_json debug"), LLM_OPTIONS)
def startup(model: Model, own: StartupOptions, engine: dict[str, Any]) -> None:
    """Start the model in new processes and show the seconds to the first token, by phase."""
    with one_line_errors(own.debug):
        _check(own, num_iters_cold=own.num_iters_cold, num_iters_warm=own.num_iters_warm)
        if engine.get("distributed_executor_backend", "mp") == "external_launcher":
            raise ValueError("a launcher starts each process once, and this starts several; use bench latency")
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for cold in range(own.num_iters_cold):
                cache = Path(folder, str(cold))
                rows.append(("cold", _started(model, own, engine, cache)))
            rows += [("warm", _started(model, own, engine, cache)) for _ in range(own.num_iters_warm)]
        table = number_table("seconds", *(kind for kind, _ in rows))
        for name in dict.fromkeys(name for _, row in rows for name in row["phases"]):
            table.add_row(name, *(f"{row['phases'].get(name, 0.0):.2f}" for _, row in rows))
        table.add_row("to the first token", *(f"{row['seconds']:.2f}" for _, row in rows))
        Console().print(table)
        _write(own, {"model": model, "starts": [{"kind": kind, **row} for kind, row in rows]})


@app.command(epilog="Example:  pagoda bench latency ./my-model --batch-size 1")
@with_options(LatencyOptions, _panels("input_len output_len batch_size num_iters_warmup num_iters"), LLM_OPTIONS)
def latency(model: Model, own: LatencyOptions, engine: dict[str, Any]) -> None:
    """Time batches of prompts of one length, from their submission to the last token."""
    with one_line_errors(own.debug):
        _check(
            own,
            num_iters=own.num_iters,
            batch_size=own.batch_size,
            input_len=own.input_len,
            output_len=own.output_len,
        )
        llm, limits = _loaded(model, own, engine)
        for _ in range(own.num_iters_warmup):
            _seconds(llm, own, own.batch_size, own.output_len)
        seconds = [_seconds(llm, own, own.batch_size, own.output_len) for _ in range(own.num_iters)]
        first = statistics.median(_seconds(llm, own, own.batch_size, 1) for _ in range(min(3, own.num_iters)))
        prompts_per_s, decoding = own.batch_size / first, statistics.median(seconds) - first
        found: dict[str, Any] = {
            "avg_latency": statistics.fmean(seconds),
            "percentiles": {p: _percentile(seconds, p) for p in _PERCENTILES},
            "time_to_first_token": first,
            "prompt_tokens_per_s": prompts_per_s * own.input_len,
        }
        if own.output_len > 1 and decoding > 0:
            steps = (own.output_len - 1) / decoding
            found["decode_tokens_per_s"] = steps * own.batch_size
            found["share_of_read_rate"] = limits.share_read(llm.program, steps)
        found["share_of_gemm"] = limits.share_multiplied(llm.program, found["prompt_tokens_per_s"], prompts_per_s)
        _show(model, own, found, limits)


@app.command(epilog="Example:  pagoda bench throughput ./my-model --num-prompts 64")
@with_options(ThroughputOptions, _panels("input_len output_len num_prompts"), LLM_OPTIONS)
def throughput(model: Model, own: ThroughputOptions, engine: dict[str, Any]) -> None:
    """Submit many prompts at once and show tokens and requests per second."""
    with one_line_errors(own.debug):
        _check(own, num_prompts=own.num_prompts, input_len=own.input_len, output_len=own.output_len)
        llm, limits = _loaded(model, own, engine)
        _seconds(llm, own, min(4, own.num_prompts), min(4, own.output_len))
        seconds = _seconds(llm, own, own.num_prompts, own.output_len)
        total_per_s = own.num_prompts * (own.input_len + own.output_len) / seconds
        output_per_s = own.num_prompts * own.output_len / seconds
        found = {
            "elapsed_time": seconds,
            "requests_per_second": own.num_prompts / seconds,
            "total_tokens_per_second": total_per_s,
            "output_tokens_per_second": output_per_s,
            "share_of_gemm": limits.share_multiplied(llm.program, total_per_s, output_per_s),
        }
        _show(model, own, found, limits)


def _check(own: BenchOptions, **values: int) -> None:
    """Raise ``ValueError`` for a number below 1, or a file that cannot be written, before anything runs."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give 1 or more")
    if own.output_json is not None and not own.output_json.parent.is_dir():
        raise ValueError(f"--output-json {own.output_json} is in a folder that does not exist; create it")


def _loaded(model: str, own: PromptOptions, engine: Mapping[str, Any]) -> tuple[LLM, MachineLimits]:
    # Imported here, so that --help answers at once.
    from transformers.utils import logging as transformers_logging

    from ..llm import LLM
    from ..reports.machine_limits import measure_limits

    logging.basicConfig(level=logging.INFO if own.verbose else logging.WARNING, format="%(name)s: %(message)s")
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    with show_phases(model):
        llm = LLM(
            model,
            own.tokenizer,
            **own.llm_options({**engine, "enable_prefix_caching": bool(own.enable_prefix_caching)}),
        )
    return llm, measure_limits()


def _seconds(llm: LLM, own: LatencyOptions | ThroughputOptions, count: int, new_tokens: int) -> float:
    """Seconds of a batch of random prompts, each of ``own.input_len`` tokens."""
    import torch

    from ..runtime.requests.sampling_params import SamplingParams

    generator = torch.Generator().manual_seed(own.seed)
    prompts = torch.randint(0, llm.program.vocab_size, (count, own.input_len), generator=generator).tolist()
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - begin


def _started(model: str, own: BenchOptions, engine: Mapping[str, Any], cache: Path) -> dict[str, Any]:
    """Start the model in a new process with this cache folder; returns what ``bench_start`` writes."""
    cache.mkdir(mode=0o700, exist_ok=True)
    given = json.dumps({"model": model, "tokenizer": own.tokenizer, "options": own.llm_options(engine)})
    done = subprocess.run(
        [sys.executable, "-P", "-m", "torch_pagoda.cli.bench_start"],
        input=given,
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_PAGODA_CACHE": str(cache), "TRANSFORMERS_VERBOSITY": "error"},
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = "\n".join(lines if own.debug else lines[-1:])
        raise RuntimeError(f"a start ended with status {done.returncode}: {reason}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _percentile(values: Sequence[float], percent: int) -> float:
    """The percentile, interpolated between two values."""
    ordered, place = sorted(values), percent / 100 * (len(values) - 1)
    below = int(place)
    return ordered[below] + (place - below) * (ordered[min(below + 1, len(values) - 1)] - ordered[below])


def _show(model: str, own: BenchOptions, found: Mapping[str, Any], limits: MachineLimits) -> None:
    table = number_table(model, "")
    for name, value in found.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for key, number in rows:
            label = name.replace("_", " ") + (f" {key}" if key else "")
            table.add_row(label, "–" if number is None else f"{number:,.3f}" if number < 10 else f"{number:,.1f}")
    table.add_row("this machine reads, GB/s", f"{limits.read_gb_per_s:.1f}")
    table.add_row(f"and multiplies, GFLOP/s in {limits.dtype}", f"{limits.gemm_gflops:,.0f}")
    Console().print(table)
    _write(own, {"model": model, **found, "read_gb_per_s": limits.read_gb_per_s, "gemm_gflops": limits.gemm_gflops})


def _write(own: BenchOptions, found: Mapping[str, Any]) -> None:
    if own.output_json is not None:
        own.output_json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
