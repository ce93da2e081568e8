"""The graphs stage: pairs of ways to run a model on the device, compared by size and timed alternately."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...compiler.build import build_unpacked
from ...compiler.options import CompileOptions
from ...compiler.report import CompileReport
from ...compiler.targets.npu.schedules.schedule_options import PASSES, asked_for
from ...compiler.targets.npu.toolchain_options import check_options
from ...compiler.verify.self_check import Reference
from ...runtime.engine.engine import Engine
from ...runtime.requests.sampling_params import SamplingParams
from .comparisons import Comparison, chosen
from .device import Device
from .model import Asked, load, open_device
from .numbers import plain
from .passes import reference_of
from .worker import Items, Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["graph_items", "made", "stage", "why_wrong"]

_PROMPT, _DECODED, _ROUNDS = 100, 32, 3
_LONGEST = 4096


def stage(**asked: Any) -> Items:
    """The items of the stage; see ``Asked``."""
    given = Asked(**asked)
    device = open_device(given)
    reference = reference_of(given)
    return graph_items(load(given, device.torch_device), reference, device, given)


def graph_items(model: PreTrainedModel, reference: Reference, device: Device, asked: Asked) -> Items:
    """One item per comparison, for a model on the device."""
    return {each.name: partial(_compare, each, model, reference, device, asked) for each in chosen(asked.comparisons)}


@dataclass
class _Side:
    """One of the two ways.

    Attributes:
        engine: the engine, its sizes compared.
        report: compile report of its program.
        wrong: reason why it is not as requested, or not right; "" if it is.
        unscheduled: a line for each schedule that is left out or matches nothing.
        peak: peak bytes while building it; None if unknown.
        steps, prompts: seconds of a decode step, and of all prompts, round by round.
        tokens: its generated tokens.
    """

    engine: Engine
    report: CompileReport
    wrong: str
    unscheduled: list[str]
    peak: int | None
    steps: list[float] = field(default_factory=list)
    prompts: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


def _compare(
    comparison: Comparison,
    model: PreTrainedModel,
    reference: Reference,
    device: Device,
    asked: Asked,
    progress: Progress,
) -> dict[str, Any]:
    """Build both engines over the same weights, then run them alternately."""
    sides: dict[str, _Side] = {}
    said: dict[str, Any] = {}
    try:
        for name, options in (("off", comparison.off), ("on", comparison.on)):
            progress({"doing": f"building the engine with it {name}"})
            sides[name] = _side(model, reference, device, asked, options)
            said[name] = _made(sides[name])
            progress(said)
        wrong = next((f"{_with(comparison, n)} {s.wrong}" for n, s in sides.items() if s.wrong), "")
        prompts = _prompts(reference, asked)
        for turn in range(_ROUNDS):
            for name in ("off", "on") if turn % 2 == 0 else ("on", "off"):
                progress({"doing": f"timing, turn {turn + 1} of {_ROUNDS}"})
                _time(sides[name], prompts, device)
        said |= {name: _timed(side, len(prompts)) | said[name] for name, side in sides.items()}
        same = sum(a == b for a, b in zip(sides["off"].tokens, sides["on"].tokens, strict=True))
        ratio = said["off"]["milliseconds"] / max(said["on"]["milliseconds"], 1e-9)
        return {"wrong": wrong, **said, "same_tokens": same, "sequences": len(prompts), "times": round(ratio, 3)}
    finally:
        sides.clear()
        gc.collect()
        device.release()


def _with(comparison: Comparison, name: str) -> str:
    return f"with {comparison.name}" if name == "on" else f"without {comparison.name}"


def _side(
    model: PreTrainedModel, reference: Reference, device: Device, asked: Asked, changes: Mapping[str, Any]
) -> _Side:
    common = {"soc": device.soc, **asked.options}
    options = CompileOptions.from_dict({"target": "npu", "block_size": asked.block_size, **common, **changes})
    check_options(options.npu_options, options.codegen, options.npu_target().product)
    report = CompileReport(type(model).__name__)
    device.peak_memory()

    def started() -> Engine:
        program = build_unpacked(model, options, report=report, reference=reference).program
        longest = min(program.max_model_len or _LONGEST, _LONGEST)
        size = options.block_size
        blocks = max(-(-longest // size), asked.max_num_seqs * -(-(_PROMPT + _DECODED + 1) // size)) + 1
        return Engine(
            program,
            num_blocks=blocks,
            max_num_seqs=asked.max_num_seqs,
            max_num_batched_tokens=asked.max_num_batched_tokens,
            max_model_len=longest,
            enable_prefix_caching=False,
        )

    engine = device.run(started)
    unscheduled = _unscheduled(report, options)
    return _Side(engine, report, why_wrong(report, options.codegen), unscheduled, device.peak_memory())


def _unscheduled(report: CompileReport, options: CompileOptions) -> list[str]:
    """A line for each requested schedule that a graph leaves out, or that matches nothing."""
    placed = {record.name for record in report.passes if record.matches}
    lines = []
    for name in asked_for(options.schedule):
        if name in report.dropped_schedules:
            lines.append(f"schedule {name!r} is left out: {report.dropped_schedules[name]}")
        elif PASSES[name] not in placed:
            why = "`pagoda inspect --schedule` says why"
            lines.append(f"schedule {name!r} matches nothing in this model on {options.soc}; {why}")
    return lines


def why_wrong(report: CompileReport, codegen: str) -> str:
    """Why a program is not as requested, or "": it runs otherwise, or without a pass or a planned size."""
    if report.codegen != codegen:
        reasons = dict(report.dropped_passes)
        return f"the graph does not run with codegen={codegen!r}: {reasons.get(codegen, 'it was left out')}"
    if report.dropped_passes:
        return "pass {} was left out: {}".format(*report.dropped_passes[0])
    wrong = next((size for size in report.sizes if size.reason), None)
    return f"{wrong.name} are left out: {wrong.reason}" if wrong else ""


def _made(side: _Side) -> dict[str, Any]:
    """The results before the timing, as JSON data."""
    said = made(side.report)
    return {**said, "limits": [*said["limits"], *side.unscheduled], "peak_bytes": side.peak}


def made(report: CompileReport) -> dict[str, Any]:
    """What became of a program, as JSON data."""
    verdict = report.verdict
    return {
        "codegen": report.codegen,
        "error": None if verdict is None else plain(verdict.error),
        "limit": None if verdict is None else plain(verdict.tolerance),
        "sizes": [
            {"name": size.name, "error": plain(size.error), "reason": size.reason, "seconds": round(size.seconds, 2)}
            for size in report.sizes
        ],
        "limits": list(report.size_limits),
        "seconds": {name: round(seconds, 2) for name, seconds in report.seconds.items()},
    }


def _prompts(reference: Reference, asked: Asked) -> list[list[int]]:
    vocab = reference.logits[0].shape[1]
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = torch.randint(0, vocab, (asked.max_num_seqs, _PROMPT), generator=generator).tolist()
    return prompts


def _time(side: _Side, prompts: list[list[int]], device: Device) -> None:
    """One round: all prompts with one token each, and once more with the decoded tokens."""
    seconds = []
    for tokens in (1, 1 + _DECODED):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = device.run(partial(side.engine.generate, prompts, params))
        seconds.append(time.perf_counter() - began)
    for output in outputs:
        if (error := output.outputs[0].error) is not None:
            raise RuntimeError(error)
    side.tokens = [list(output.outputs[0].token_ids) for output in outputs]
    side.prompts.append(seconds[0])
    side.steps.append((seconds[1] - seconds[0]) / _DECODED)


def _timed(side: _Side, prompts: int) -> dict[str, Any]:
    stats = side.engine.stats()
    step = statistics.median(side.steps)
    return {
        "milliseconds": round(1e3 * step, 3),
        "tokens_per_second": round(prompts / max(step, 1e-9), 1),
        "prompt_tokens_per_second": round(prompts * _PROMPT / statistics.median(side.prompts), 1),
        "milliseconds_by_turn": [round(1e3 * each, 3) for each in side.steps],
        "operator_steps": int(stats.get("operator_steps", 0)),
    }
