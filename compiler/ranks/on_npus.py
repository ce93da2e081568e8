"""Programs of several ranks for NPUs: each rank cuts, lowers and compiles the graph for its own device.

Rank 0 traces the model on the CPU, compares all ranks with it in lockstep by the reference kernels, and ships the
graph in front of the passes that cut it. Its own part is made of the shipment, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from ...passes import UnsupportedModel
from ...passes.graph.notes import fewest_bits
from ...runtime.parallel.group import GroupFailed
from ..build import rewritten
from ..link.linkage import Linkage
from ..link.linker import LinkedProgram, link
from ..npu_program import link_for_npu
from ..options import CompileOptions
from ..pass_stages import Stages
from ..pipeline import hold_weights, lowered_rank
from ..report import CompileReport
from ..tolerance import Tolerance, routes_tokens
from ..user_passes import registered_passes
from ..verify.cache_restart import restart_length
from ..verify.self_check import Reference
from ..warm_start.canonical import CanonicalGraph, canonical_graph
from ..warm_start.checkpoint_files import CheckpointFiles
from ..warm_start.graph_data import CannotStore
from ..warm_start.record import Sources
from ..warm_start.restore import constants_of, describe
from ..warm_start.shipment import AnyProgram, Lowering, OtherRanks, Shipment
from ..weights.tensor_contents import module_tensors
from .lead import led, sources_for_ranks


def program_on_npus(
    model: nn.Module,
    options: CompileOptions,
    owns_weights: bool,
    files: CheckpointFiles | None,
    others: OtherRanks,
) -> AnyProgram:
    """The program of all ranks, each of which lowers the graph for its own device.

    Raises:
        UnsupportedModel: as ``led``; or they cannot run the code that ``codegen`` selects.
    """
    report = CompileReport(type(model).__name__)
    sources = sources_for_ranks(model, files)
    shipment, reference = shipped_for_npus(model, options, sources, report)
    others.load(shipment)
    named = module_tensors(model)
    own = with_report(lowered_program(shipment, 0, named, others.device), report)
    try:
        return led(own, model, reference, owns_weights, others)
    except GroupFailed as error:
        if options.codegen == "none":
            raise
        raise UnsupportedModel(
            f"tensor_parallel_size={options.tensor_parallel_size} with codegen={options.codegen!r}: {error}; "
            "codegen='none' runs operator by operator"
        ) from error


def shipped_for_npus(
    model: nn.Module, options: CompileOptions, sources: Sources | None, report: CompileReport
) -> tuple[Shipment, Reference | None]:
    """What every rank makes its part of, and the model's logits.

    Args:
        model: on the CPU.
        options: with target "npu" and a definite codegen.
        sources: where its tensors are in the checkpoint's files.
        report: filled in.

    Raises:
        UnsupportedModel, ValueError: as ``build_program``; or the graph has no plain form.
    """
    asked = f"tensor_parallel_size={options.tensor_parallel_size}"
    if names := [*(pattern.name for pattern in options.patterns), *registered_passes()]:
        raise UnsupportedModel(
            f"{asked}: pass {names[0]!r} runs in this process alone, and each rank lowers the graph for its NPU in "
            "its own; take it back"
        )
    _, graphs, references = rewritten(model, options, report)
    unsharded, reference = graphs.unsharded, references.whole
    assert unsharded is not None
    switch = unsharded.notes.rope_switch
    restart = None if switch is None else restart_length(model, switch)
    try:
        stored = describe(unsharded, Linkage.of(unsharded, restart), model)
        canonical = CanonicalGraph.of(unsharded)
    except CannotStore as error:
        raise UnsupportedModel(f"{asked}: the graph cannot be sent to other ranks ({error}); omit it") from error
    tolerance = None
    if reference is not None:
        tolerance = reference.tolerance, reference.share if routes_tokens(unsharded.graph) else 1.0
    lowering = Lowering(
        canonical,
        {field.name: getattr(options, field.name) for field in fields(options)},
        [name for name, _ in report.dropped_passes],
        report.model,
        tolerance,
    )
    return Shipment(stored, sources, options.packs, lowering), reference


def lowered_program(
    shipment: Shipment, rank: int, named: Mapping[str, torch.Tensor], device: torch.device
) -> LinkedProgram:
    """The part of a shipped graph that one rank runs.

    Args:
        shipment: from ``shipped_for_npus``.
        rank: of this process.
        named: tensors of the module by name, in the host's memory.
        device: that runs it.

    Raises:
        Outdated: the tensors are not those of the model that was compiled.
        UnsupportedModel: a pass fails, or the options select what there is not.
    """
    stored, lowering = shipment.program, shipment.lowering
    assert lowering is not None
    options = CompileOptions.from_dict(lowering.options)
    unsharded = canonical_graph(lowering.canonical, stored, constants_of(stored, named), device)
    unsharded.npu = options.npu_target(device.type)
    unsharded.cache_dtype, unsharded.quantization = options.cache_dtype, options.weight_quantization
    unsharded.input_bits = options.input_bits
    report = CompileReport(lowering.model)
    traced, report.passes = lowered_rank(unsharded, options, rank, lowering.dropped)
    hold_weights(traced, Stages.of(options).weights, options.quantization, report)
    restart = stored.linkage.restart_length
    linked: Any = functools.partial(link, traced, report=report, restart_length=restart)
    bits = fewest_bits(traced.notes.quantized)
    program = link_for_npu(linked, traced, options, None, report, release=True)
    program.weight_bits = bits
    if lowering.tolerance is not None:
        program.tolerance = Tolerance(*lowering.tolerance)
    return program


def with_report(program: LinkedProgram, report: CompileReport) -> LinkedProgram:
    """The program with the report of compiling the whole model, and of its own code."""
    own = program.report
    program.report = replace(report, codegen=own.codegen, dropped_schedules=own.dropped_schedules, passes=own.passes)
    return program
