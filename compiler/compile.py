"""Loads a program from the store, or compiles and stores it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Container
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..passes import NotFinite, UnsupportedModel
from ..runtime.ops.kernel_check import check_kernels
from ..runtime.ops.native import begin_loading
from ..runtime.phases import phase, timed
from .calibrate.recorded_grid import on_recorded_grid
from .live_module.describer import CannotIdentify
from .options import CompileOptions
from .ranks.lead import led, shipped, sources_for_ranks
from .report import CompileReport
from .user_passes import registered_passes
from .verify import dump
from .verify.self_check import SHORT_SCHEDULE, check, not_finite, reference_of_model
from .warm_start.checkpoint_files import CheckpointFiles
from .warm_start.file import ProgramStore, open_store
from .warm_start.graph_data import CannotStore
from .warm_start.identity import identity
from .warm_start.record import (
    Record,
    Sources,
    check_record,
    known_tensors,
    model_of,
    record_or_none,
    start_tensors,
    warm_key,
)
from .warm_start.restore import (
    Outdated,
    StoredProgram,
    StoredReference,
    describe,
    restore,
    stage_of_rank,
    tensors_read,
)
from .warm_start.shipment import AnyProgram, OtherRanks, Shipment
from .weights.tensor_contents import contents_digest, module_tensors

if TYPE_CHECKING:
    from .build import Built
    from .verify.streamed_reference import LayersInFiles

log = logging.getLogger(__name__)


def compile_program(
    model: nn.Module,
    options: CompileOptions,
    *,
    owns_weights: bool = False,
    files: CheckpointFiles | None = None,
    loaded: Container[str] | None = None,
    others: OtherRanks | None = None,
    layers: LayersInFiles | None = None,
) -> AnyProgram:
    """Compile ``model`` into a paged program, or load the stored one of an earlier process.

    Arguments and errors as for ``build.build_program``. Stored are programs for a CPU that run without inductor and
    from which the self-check dropped nothing.

    Args:
        files: files that the model was just loaded from, by which ``program_of_checkpoint`` finds the program.
        loaded: names of the Python modules loaded before the model was; by default those loaded now.
        others: the ranks besides this one, where the options ask for several.
        layers: those that are not loaded, where there are several ranks on CPUs and the model does not fit.
    """
    options = options.for_device((next(model.parameters()) if others is None else others).device.type)
    if others is not None and options.target == "npu":
        from .ranks.on_npus import program_on_npus

        return program_on_npus(model, options, owns_weights, files, others)
    if options.target == "cpu":
        begin_loading()  # what must be compiled is ready when the first program runs
    store, key, contents, record = open_store(), "", "", None
    reason = _not_stored(options)
    if store is not None and reason:
        log.info("not storing the program for later starts: %s", reason)
        store = None
    if layers is not None and files is not None and others is not None:
        from .ranks.by_layers import program_by_layers

        return program_by_layers(layers, options, files, sys.modules if loaded is None else loaded, store, others)
    sources, compares_all, state = None, False, None
    if files is not None and others is None and options.target == "cpu" and options.verify != "off":
        state = next(iter(files.known), None) or files.state()  # when it was looked for first
        sources, compares_all = _checked_sources(model, files)  # before anything packs the weights, or moves them
    if store is not None:
        seconds: dict[str, float] = {}
        with timed(seconds), phase("load"):
            try:
                contents = contents_digest(model)
                found = identity(model, options, contents)
                key = found.digest
            except CannotIdentify as error:
                log.info("not storing the program for later starts: %s", error)
                store = stored = None
            else:
                if files is not None and (sources is not None or (others is not None and options.verify != "off")):
                    before = sys.modules if loaded is None else loaded
                    record = record_or_none(model, options, found, files, before, sources)
                stored = _stored(store, key, model, options, owns_weights, files, others)
        if store is not None and stored is not None:
            stored.report.stored, stored.report.seconds = True, seconds
            if record is not None and stored.rope_switch is None:
                store.save(*record)
            return stored
    # Imported here: it brings the tracer, which a process that finds its program in the store never needs.
    from .build import build_unpacked, finish

    built = build_unpacked(model, options, owns_weights=owns_weights, compares_all=compares_all)
    if options.target == "cpu" and options.verify != "off":
        check_kernels()
    data = None
    if others is not None:
        data = shipped(built, model)
        others.load(Shipment(data, sources_for_ranks(model, files), options.packs))
    elif store is not None and _is_plain(built.program.report):
        data = _described(built, model, contents)
    try:
        finish(built, owns_weights=owns_weights)
    except NotFinite as error:
        named = model.named_parameters() if files is None else files.tensors().items()
        raise NotFinite(not_finite(type(model).__name__, named)) from error
    if files is not None and state is not None and not files.are_as(state):
        raise ValueError("a file of the checkpoint was written or removed while it was loaded; start again")
    program: AnyProgram = built.program
    if others is not None:
        program = led(built.program, model, built.reference, owns_weights, others)
    if store is not None and data is not None:
        reference = None if built.reference is None else StoredReference.of(built.reference)
        store.save(key, replace(data, report=built.program.report, reference=reference))
        if record is not None and program.rope_switch is None:
            store.save(*record)
    return program


@phase("load")
def _checked_sources(model: nn.Module, files: CheckpointFiles) -> tuple[Sources | None, bool]:
    """What a module that was just loaded is in its files; and whether only a comparison of all layers tells that each
    is the right one.

    Raises:
        UnsupportedModel: a layer holds what the files say is another's.
    """
    from .warm_start.layer_sources import layers_as_numbered  # it brings what reads modules

    try:
        known = known_tensors(model, files)
        sources = known.sources(module_tensors(model))
    except (CannotStore, OSError, ValueError) as error:
        log.info("later starts will have to load the model's class: %s", error)
        return None, True
    return sources, not layers_as_numbered(model, known, sources)


def program_of_checkpoint(
    files: CheckpointFiles, options: CompileOptions, others: OtherRanks | None = None
) -> tuple[AnyProgram, Any] | None:
    """The stored program of a checkpoint, over its tensors, and the model's configs (see ``record.model_of``).

    Creates neither the model's class nor its modules. Once the weights are packed, the program is compared with the
    logits that the model returned when it was compiled.

    Args:
        files: the checkpoint's files; they are mapped, and their tensors belong to the program.
        options: compile options for a CPU, which holds the program's tensors.
        others: as for ``compile_program``.

    Returns:
        None if there is no such program, or it may not match the checkpoint any more.

    Raises:
        ValueError: the options contradict the grid of the checkpoint's weights.
    """
    config = SimpleNamespace(**json.loads(files.texts["config.json"]))
    options = on_recorded_grid(options, config).for_device("cpu")
    store = open_store()
    if store is None or options.verify == "off" or _not_stored(options):
        return None
    begin_loading()
    seconds: dict[str, float] = {}
    with timed(seconds), phase("load"):
        try:
            name = warm_key(files, options)
            if (record := store.load(name, Record)) is None:
                return None
            check_record(record)
        except (CannotIdentify, Outdated, OSError, ValueError) as error:
            log.info("loading the model's class: %s", error)
            return None
        program = _of_record(store, name, record, files, options, others)
    if program is None:
        return None
    program.report.stored, program.report.seconds = True, seconds
    return program, model_of(record.facts)


def _of_record(
    store: ProgramStore,
    name: str,
    record: Record,
    files: CheckpointFiles,
    options: CompileOptions,
    others: OtherRanks | None,
) -> AnyProgram | None:
    """The program of a record, its weights packed and compared; None if it is missing or wrong."""
    stored = store.load(record.program, StoredProgram)
    if stored is None or stored.reference is None:
        return None
    try:
        own = stage_of_rank(stored, 0)
        program = restore(
            own, start_tensors(record, files, tensors_read(own), in_parts=others is not None), merge=not options.packs
        )
        reference = stored.reference.reference()
    except Exception as error:
        log.warning("cannot use the stored program %s (%s); loading the model's class", record.program, error)
        store.discard(name)
        return None
    check_kernels()
    if others is not None:
        others.load(Shipment(stored, Sources(record.weights, record.tensors, record.stored), options.packs))
    if options.packs or program.has_stored_weights:
        program.pack_weights(release=True)
    led: AnyProgram = program if others is None else others.lead(program)
    verdict = check(led, reference, weight_bits=program.weight_bits)
    if not verdict.ok:
        log.warning("the stored program %s does not match the model: %s; recompiling", record.program, verdict.reason)
        store.discard(name)
        store.discard(record.program)
        return None
    return led


def _not_stored(options: CompileOptions) -> str:
    if options.target != "cpu":
        return f"it is for target={options.target!r}"
    if options.verify == "every-pass" or dump.is_on():
        return "its passes must be inspected"
    names = [pattern.name for pattern in options.patterns] + registered_passes()
    return f"the content of pass {names[0]!r} is not known" if names else ""


def all_layers_needed(options: CompileOptions) -> str:
    """Why a few layers of a model cannot be compiled for all; "" if they can where they are alike."""
    if options.verify in ("full", "every-pass"):
        return f"verify={options.verify!r} compares all layers; use 'model'"
    if options.target != "cpu":
        return f"it is for target={options.target!r}"
    if dump.is_on():
        return "its graphs are dumped"
    names = [pattern.name for pattern in options.patterns] + registered_passes()
    return f"the pass {names[0]!r} may treat layers differently" if names else ""


def _stored(
    store: ProgramStore,
    key: str,
    model: nn.Module,
    options: CompileOptions,
    release: bool,
    files: CheckpointFiles | None,
    others: OtherRanks | None,
) -> AnyProgram | None:
    """The stored program with this key, compared with the model and its weights packed; None if none matches.

    Raises:
        UnsupportedModel: its quantized weights do not match the model; it is removed.
    """
    stored = store.load(key, StoredProgram)
    if stored is None or (stored.reference is None and options.verify != "off"):
        return None
    try:
        program = restore(stage_of_rank(stored, 0), module_tensors(model))
    except Outdated as error:
        log.info("not using the stored program: %s", error)
        store.discard(key)
        return None
    except Exception as error:
        log.warning("cannot use the stored program %s (%s); recompiling", key, error)
        store.discard(key)
        return None
    reference = None
    if stored.reference is not None and options.verify != "off":
        check_kernels()
        own = reference_of_model(model, SHORT_SCHEDULE)
        reference = replace(own, tolerance=stored.reference.tolerance, share=stored.reference.share)
    if others is not None:
        others.load(Shipment(stored, sources_for_ranks(model, files), options.packs))
        if options.packs or program.has_stored_weights:
            program.pack_weights(release=release)
        return led(program, model, reference, release, others)
    # Until weights are rounded and packed, every product would round its own; nothing computes with stored ones.
    packs_first = bool(options.quantization) or program.has_stored_weights
    if reference is not None and not packs_first:
        verdict = check(program, reference)
        if not verdict.ok:
            log.warning("the stored program %s does not match the model: %s; recompiling", key, verdict.reason)
            store.discard(key)
            return None
    if options.packs or packs_first:
        program.pack_weights(release=release)
    if reference is not None and packs_first:
        verdict = check(program, reference, weight_bits=program.weight_bits)
        if not verdict.ok:
            store.discard(key)
            raise UnsupportedModel(f"the stored program does not match the model: {verdict.reason}; restart")
    return program


def _described(built: Built, model: nn.Module, contents: str) -> StoredProgram | None:
    """The data to store of a program whose weights are not packed yet; None if it cannot be stored."""
    if contents_digest(model) != contents:
        log.info("not storing the program for later starts: the first call changed tensors of the module")
        return None
    try:
        return describe(built.traced, built.program.linkage, model)
    except CannotStore as error:
        log.info("not storing the program for later starts: %s", error)
        return None


def _is_plain(report: CompileReport) -> bool:
    """True if recompiling would give the same program, in our own kernels."""
    return report.codegen == "none" and not report.dropped_passes
