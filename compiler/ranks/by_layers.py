"""Programs of models that do not fit into a host's memory: few layers are loaded and compiled for all.

The whole model runs once, layer by layer, for its logits. The ranks take their parts from the files, rank 0 among
them, and are compared with these logits together.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import replace

from torch import nn

from ...passes import UnsupportedModel
from ...runtime.ops.kernel_check import check_kernels
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.phases import timed
from ..build import rewritten
from ..link.linkage import Linkage
from ..live_module.describer import CannotIdentify
from ..options import CompileOptions
from ..report import CompileReport
from ..verify.cache_restart import restart_length
from ..verify.self_check import Reference
from ..verify.streamed_reference import LayersInFiles
from ..warm_start.checkpoint_files import CheckpointFiles
from ..warm_start.file import ProgramStore
from ..warm_start.graph_data import CannotStore
from ..warm_start.identity import identity
from ..warm_start.record import record_or_none
from ..warm_start.restore import Outdated, StoredReference, describe
from ..warm_start.shipment import AnyProgram, OtherRanks, Shipment
from ..warm_start.streamed import StreamedModel, check_streamed, place_forms, stream, streamed_key
from ..weights.tensor_contents import module_tensors
from .lead import led, program_of_rank

log = logging.getLogger(__name__)


def program_by_layers(
    layers: LayersInFiles,
    options: CompileOptions,
    files: CheckpointFiles,
    loaded: Container[str],
    store: ProgramStore | None,
    others: OtherRanks,
) -> AnyProgram:
    """The program of all ranks, of which this one, too, takes its part from the files.

    Raises:
        UnsupportedModel: as ``led``; or the layers cannot be loaded one by one.
    """
    model = layers.repeat.model
    report = CompileReport(type(model).__name__)
    check_kernels()
    key, record, kept = "", None, None
    try:
        kept = None if store is None else (store, streamed_key(files))
    except CannotIdentify as error:
        log.info("not storing the program for later starts: %s", error)
    shipment, reference = shipped_by_layers(layers, options, files, kept, report)
    if kept is not None and reference is not None:
        try:
            found = identity(model, options, str(files.contents()))
            key, record = found.digest, record_or_none(model, options, found, files, loaded, shipment.sources)
        except CannotIdentify as error:
            log.info("not storing the program for later starts: %s", error)
    others.load(shipment)
    release_weights(model)
    own = program_of_rank(shipment, 0, files, None)
    try:
        program = led(own, model, reference, False, others)
    except UnsupportedModel:
        if kept is not None:
            kept[0].discard(kept[1])
        raise
    if kept is not None and record is not None and reference is not None:
        program_to_keep = replace(shipment.program, report=own.report, reference=StoredReference.of(reference))
        kept[0].save(key, program_to_keep)
        kept[0].save(*record)
    return program


def shipped_by_layers(
    layers: LayersInFiles,
    options: CompileOptions,
    files: CheckpointFiles,
    kept: tuple[ProgramStore, str] | None,
    report: CompileReport,
) -> tuple[Shipment, Reference | None]:
    """What every rank makes its part of, and the model's logits.

    Args:
        layers: of the model, on the CPU.
        options: for several ranks on CPUs.
        files: the checkpoint's.
        kept: where the logits are kept, and under which name.
        report: filled in.

    Raises:
        UnsupportedModel, ValueError: as ``build_program``; or its layers cannot be loaded one by one.
    """
    model, repeat = layers.repeat.model, layers.repeat
    try:
        with timed(report.seconds):
            streamed = _streamed(layers, files, kept)
        reference = None if options.verify == "off" else streamed.reference.reference()
        report.layers_streamed = repeat.total - repeat.kept
        _, graphs, references = rewritten(model, options, report, reference, repeat)
        traced = graphs.traced
        switch = traced.notes.rope_switch
        restart = None if switch is None else restart_length(model, switch)
        stored = describe(traced, Linkage.of(traced, restart), model)
    except CannotStore as error:
        raise UnsupportedModel(
            f"{report.model} does not fit into this host's memory, and has no layers that can be loaded one by one: "
            f"{error}"
        ) from error
    if name := next((name for name, tensor in stored.tensors.items() if tensor.is_meta), None):
        raise UnsupportedModel(f"{report.model} does not fit into this host's memory, and {name} is computed from it")
    return Shipment(replace(stored, report=report), streamed.sources, options.packs), references.whole


def release_weights(model: nn.Module) -> None:
    """Free the weights of a module that is run no more."""
    for tensor in module_tensors(model).values():
        if isinstance(tensor, StoredWeight):
            tensor.release()
        else:
            tensor.data = tensor.new_empty(0)


def _streamed(layers: LayersInFiles, files: CheckpointFiles, kept: tuple[ProgramStore, str] | None) -> StreamedModel:
    """The logits and sources that are kept, or new ones, which then are."""
    model, repeat = layers.repeat.model, layers.repeat
    if kept is not None and (found := kept[0].load(kept[1], StreamedModel)) is not None:
        try:
            check_streamed(found, model)
            place_forms(layers, found.sources, files)
            return found
        except (Outdated, ValueError) as error:
            log.warning("not using the stored logits %s: %s", kept[1], error)
            kept[0].discard(kept[1])
    log.warning(
        "%s does not fit into this host's memory: %d of its %d layers are loaded one after the other, to compare",
        type(model).__name__,
        repeat.total - repeat.kept,
        repeat.total,
    )
    made = stream(layers, files)
    place_forms(layers, made.sources, files)
    if kept is not None:
        kept[0].save(kept[1], made)
    return made
