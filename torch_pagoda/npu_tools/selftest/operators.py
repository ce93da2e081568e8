"""The operators stage: compares each call of the model's lowered graphs, at its real shapes, with its CPU
semantics."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...compiler import UnsupportedModel
from ...compiler.capture.trace import Captured, capture
from ...compiler.link.linker import link
from ...compiler.options import CompileOptions, installed_cann
from ...compiler.pipeline import run_pipeline
from ...compiler.report import CompileReport, first_line
from ...compiler.targets.npu.decode_steps import StepKinds
from ...compiler.targets.npu.weights.weights import plan_weights, prepare_weights
from ...compiler.verify.self_check import PlannedStep, Reference, Schedule, planned_steps
from ...passes import TracedGraph
from ...passes.lower.npu.decode_graph import decode_graph_or_reason
from ...runtime.npu_target import GRAPH_MODES, NpuTarget
from .delta_rule_items import delta_rule_items
from .device import Device
from .graph_calls import is_undocumented, through_ge
from .model import Asked, load, open_device
from .numbers import plain
from .operator_check import Collected, Collector, OperatorCall, run_call
from .window_calls import plain_arguments, window_calls
from .worker import Items, Progress

__all__ = ["operator_items", "stage"]

log = logging.getLogger(__name__)

SCHEDULE = Schedule((290, 33, 150), (129, 20, 64), 128, decoded=3)
"""Prompts that begin and continue with a chunk, of more and of less than a block, then decoded tokens."""


def stage(**asked: Any) -> Items:
    """The items of the stage; see ``Asked``."""
    given = Asked(**asked)
    return operator_items(load(given, torch.device("cpu")), open_device(given), given)


def operator_items(model: torch.nn.Module, device: Device, asked: Asked) -> Items:
    """One item per distinct call by operator, shapes and kind of step, for attention around each window of the
    model, and for GE graphs of calls whose form is not documented.

    Args:
        model: the model on the CPU.
        device: the device that runs the calls.
        asked: parameters, with compile options.
    """
    captured = capture(model)
    found = Collected()
    kept: list[tuple[OperatorCall, int, bool]] = []
    windows: set[tuple[str, tuple[tuple[str, int | float | str], ...]]] = set()
    items: dict[str, Callable[[Progress], dict[str, Any]]] = {}
    for mode in reversed(GRAPH_MODES):
        into = Collected(counts={}, first=dict(found.first), last={})
        try:
            traced = _lowered(captured, asked, device.soc, mode)
        except UnsupportedModel as error:
            items[f"lowering for {mode}"] = partial(_refused, first_line(error))
            continue
        items |= delta_rule_items(traced, device)
        decode, reason = decode_graph_or_reason(traced)
        if reason:
            items[f"decode steps for {mode}"] = partial(_refused, reason)
        for name, step, arguments in _steps(traced, model):
            log.info("running %s with the CPU's kernels: %s", name, mode)
            given = arguments(step)
            graph = traced if decode is None or not StepKinds(traced).is_decode(given) else decode
            collector = Collector(graph.module, into, list(graph.constants.values()), name)
            with torch.inference_mode():
                collector.run(*given)
        new = Collected(
            first={s: call for s, call in into.first.items() if s not in found.first},
            last={s: call for s, call in into.last.items() if s not in found.first},
            counts=into.counts,
        )
        kept += [_with_nz(call, count, traced) for call, count in new.calls()]
        if mode == "ge":
            for signature, count in into.counts.items():
                if is_undocumented(call := into.first[signature]):
                    function = through_ge(call, device.soc)
                    items[_free(f"{call.name}, GE graph", items)] = partial(_compare, call, count, device, function)
        found.first.update(into.first)
        for call, count in window_calls(traced, decode):
            if (alike := (call.name, plain_arguments(call.kwargs))) not in windows:
                windows.add(alike)
                kept.append((call, count, False))
    for call, count, demanded in kept:
        as_stored = dataclasses.replace(call, turned=())
        variants = [call] if demanded or not call.turned else [as_stored, call]
        for variant in variants:
            items[_free(variant.name, items)] = partial(_compare, variant, count, device, None)
    return items


def _free(name: str, items: Mapping[str, Any]) -> str:
    """The name, with a number where a call has it already: of the same shapes, with other strides or numbers."""
    return next(
        each for each in itertools.chain([name], (f"{name}, {i}" for i in itertools.count(2))) if each not in items
    )


def _refused(reason: str, progress: Progress) -> dict[str, Any]:
    return {"wrong": reason}


def _lowered(captured: Captured, asked: Asked, soc: str, mode: str) -> TracedGraph:
    """A lowered graph of the model, with its weights."""
    captured.traced.npu = NpuTarget(soc, asked.block_size, mode, installed_cann())
    options = CompileOptions(target="npu", codegen="none", verify="off", soc=soc, **asked.options)
    traced = run_pipeline(captured, options, None, CompileReport("selftest"))
    prepare_weights(traced, fractal_nz=False, release=False)
    return traced


def _steps(
    traced: TracedGraph, model: torch.nn.Module
) -> list[tuple[str, PlannedStep, Callable[[PlannedStep], list[Any]]]]:
    """Kind, step and ordered arguments of the steps that exercise a graph."""
    program = link(traced, traced.module)
    traced.recompile()
    schedule = SCHEDULE.within(program.max_model_len or 1 << 30)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, program.vocab_size, (n,), generator=generator) for n in schedule.lengths]
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    reference = Reference(tokens, [torch.zeros(len(t), 1) for t in tokens], dtype, schedule, 0.0)

    def arguments(step: PlannedStep) -> list[Any]:
        return program.arguments(step.input_ids, step.position_ids, step.metadata)

    return [(_kind(step), step, arguments) for step in planned_steps(program, reference)]


def _kind(step: PlannedStep) -> str:
    tokens, sequences = step.input_ids.shape[1], step.metadata.seq_lens.shape[0]
    return f"decode of {sequences}" if tokens == sequences else f"{tokens} tokens of {sequences}"


def _with_nz(call: OperatorCall, count: int, traced: TracedGraph) -> tuple[OperatorCall, int, bool]:
    """The call with its weights converted to FRACTAL_NZ, and whether it accepts only that format."""
    leaves = {id(leaf) for leaf in pytree.tree_leaves((call.args, call.kwargs))}
    plans = [p for p in plan_weights(traced) if p.fractal_nz and id(traced.constants[p.name]) in leaves]
    turned = tuple(traced.constants[plan.name] for plan in plans)
    return dataclasses.replace(call, turned=turned), count, any(plan.demanded for plan in plans)


def _compare(
    call: OperatorCall, count: int, device: Device, function: Callable[..., Any] | None, progress: Progress
) -> dict[str, Any]:
    """Run a call, or ``function`` in its place, and report the differences, as JSON data."""
    difference, seconds = run_call(call, device.torch_device, device.run, function)
    return {
        "wrong": difference.reason,
        "operator": call.operator,
        "shapes": call.shapes,
        "step": call.step,
        "module": call.module,
        "calls": count,
        "fractal_nz": bool(call.turned),
        "largest": plain(difference.largest),
        "of_limit": plain(difference.of_limit),
        "beyond": plain(difference.beyond),
        "where": difference.where,
        "microseconds": round(1e6 * seconds, 1),
    }
