"""The stages of building a program: reference, capture, pipeline, code generation, packed weights; verified after
each."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

from torch import nn

from ..passes import TracedGraph, UnsupportedModel
from ..runtime.phases import timed
from .capture.layer_repeat import CannotRepeat, LayerRepeat
from .capture.recurrent_modules import check_recurrent_modules
from .capture.state_layers import check_state
from .capture.stored_parameters import has_stored_parameters, unpack_latent_attention
from .capture.trace import Captured, capture
from .link.linker import LinkedProgram, link, link_stage
from .npu_program import Linked, link_for_npu
from .options import CompileOptions
from .pipeline import References, Rewritten, rewrite, tolerating_depth
from .report import CompileReport, Verdict, first_line
from .targets.cpu.inductor import generate_code, is_fusible
from .targets.cpu.kernels import call_kernels
from .user_passes import registered_passes
from .verify import dump
from .verify.cache_restart import restart_length
from .verify.copied_layers import PackedProducts
from .verify.self_check import (
    SHORT_SCHEDULE,
    Reference,
    check,
    reference_of_model,
    reference_of_program,
)
from .weights.file_pages import FilePages

log = logging.getLogger(__name__)


@dataclass
class Built:
    """A program whose weights are not packed yet.

    Attributes:
        program: the program, linked and compared with the model.
        traced: its graph.
        options: its compile options.
        reference: the logits of the model, or, once ``finish`` has compared the few layers of ``shallow``, those of
            the program; None if nothing is compared.
        shallow: a program of the captured layers, and the model's logits with these layers alone; None if all layers
            were captured, or ``reference`` is thorough.
        products: with the weights that are to be packed, where ``shallow`` is all that is compared with the model.
    """

    program: LinkedProgram
    traced: TracedGraph
    options: CompileOptions
    reference: Reference | None
    shallow: Shallow | None = None
    products: PackedProducts | None = None

    @property
    def is_compared(self) -> bool:
        """Whether a change of the program is compared with the model."""
        return self.reference is not None or self.shallow is not None

    def check(self, weight_bits: int | None = None) -> Verdict:
        """Compare the program, and the shallow one over its weights; the verdict of the first that is not right."""
        verdict = None
        if self.reference is not None:
            verdict = check(self.program, self.reference, weight_bits=weight_bits)
        if self.shallow is not None and (verdict is None or verdict.ok):
            self.shallow.program.share_weights(self.program)
            verdict = check(self.shallow.program, self.shallow.reference, weight_bits=weight_bits)
        assert verdict is not None
        if not verdict.ok or self.products is None:
            return verdict
        try:
            reason = self.products.fault(self.program)
        except Exception as error:
            reason = f"a product with a packed weight failed: {first_line(error)}"
        return replace(verdict, ok=not reason, reason=reason)


@dataclass(frozen=True)
class Shallow:
    """A model with the layers alone that stand for all.

    Attributes:
        program: its program.
        reference: its logits.
        of_all: what the program of all layers is judged by, but for its logits.
    """

    program: LinkedProgram
    reference: Reference
    of_all: Reference


def build_program(
    model: nn.Module,
    options: CompileOptions,
    *,
    owns_weights: bool = False,
    report: CompileReport | None = None,
) -> LinkedProgram:
    """Compile ``model`` into a paged program.

    The program's ``report`` attribute is the ``CompileReport``.

    Args:
        model: a HuggingFace causal LM in eval mode. Its parameters may become views of merged tensors; names,
            values and shapes stay.
        options: see ``CompileOptions``.
        owns_weights: only the program uses the model, so packed weights may be freed.
        report: filled in, so that it is available if compiling fails; by default a new one.

    Raises:
        UnsupportedModel: the model cannot be served exactly; the message names the part and the reason.
        ValueError: ``codegen`` does not match the target or the device.
    """
    options = options.for_device(next(model.parameters()).device.type)
    built = build_unpacked(model, options, report=report, owns_weights=owns_weights)
    finish(built, owns_weights=owns_weights)
    return built.program


def build_unpacked(
    model: nn.Module,
    options: CompileOptions,
    *,
    owns_weights: bool = False,
    report: CompileReport | None = None,
    reference: Reference | None = None,
    compares_all: bool = False,
) -> Built:
    """The first part of ``build_program``, up to packing the weights for a CPU, with a definite target.

    ``reference`` is compared with, unless nothing is; by default the model itself, run on its device, or, where few
    layers stand for all, with these layers alone, unless ``compares_all``. With ``owns_weights`` the program may run
    only after the second part.
    """
    report = CompileReport(type(model).__name__) if report is None else report
    found = rewritten(model, options, report, reference, compares_all=compares_all)
    with timed(report.seconds):
        captured, graphs, references = found
        traced, reference = graphs.traced, references.whole
        switch = traced.notes.rope_switch
        restart = None if switch is None else restart_length(model, switch)
        inductor = (
            traced.npu is None
            and options.world_size == 1
            and options.uses_inductor(sum(p.numel() for p in model.parameters()), is_fusible(traced))
        )
        # What is packed before anything runs it need not be merged first.
        merge = not owns_weights or inductor or traced.npu is not None or not options.packs
        linked = functools.partial(link, traced, report=report, restart_length=restart, merge=merge)
        shallow = None
        if references.shallow is not None and options.world_size == 1:
            of_few = link(graphs.captured, call_kernels(graphs.captured), merge=merge)
            of_all = tolerating_depth(references.shallow, captured.repeat)
            shallow = Shallow(of_few, references.shallow, of_all)
            if inductor and reference is None:  # which compiles all layers as one
                own = reference_of_model(model, SHORT_SCHEDULE)
                reference = replace(own, tolerance=of_all.tolerance, share=of_all.share)
        if bounds := traced.notes.boundaries:
            program = link_stage(traced, len(bounds), report, restart_length=restart, merge=merge)
        elif traced.npu is not None:
            program = link_for_npu(linked, traced, options, reference, report, owns_weights)
        elif inductor:
            # Until weights are rounded and packed, every product would round its own.
            unpacked = options.quantization or has_stored_parameters(model)
            program = _link_inductor(linked, captured, traced, None if unpacked else reference, report)
        else:
            program = linked(call_kernels(traced))
        products = PackedProducts.of(traced) if shallow is not None and reference is None else None
        return Built(program, traced, options, reference, shallow, products)


def rewritten(
    model: nn.Module,
    options: CompileOptions,
    report: CompileReport,
    reference: Reference | None = None,
    repeat: LayerRepeat | None = None,
    *,
    compares_all: bool = False,
) -> tuple[Captured, Rewritten, References]:
    """The captured graph, those that the passes made of it, and what they were compared with.

    Args:
        model, options: as for ``build_program``, with a definite target.
        report: filled in.
        reference: see ``build_unpacked``.
        repeat: the layers of a model of which only the first ``repeat.kept`` are loaded, which are compared with the
            module's; ``reference`` is that of all layers.
        compares_all: see ``build_unpacked``.

    Raises:
        UnsupportedModel, ValueError: as ``build_program``.
    """
    if (config := getattr(model, "config", None)) is not None:
        check_state(type(model), config)
    if has_stored_parameters(model) and options.quantization is not None:
        raise ValueError(
            f"quantization={options.quantization!r}: the checkpoint is already quantized and keeps its "
            "weights; omit quantization, or pass the original unquantized checkpoint"
        )
    if options.input_bits is not None and not has_stored_parameters(model):
        raise ValueError(
            f"input_bits={options.input_bits} is for quantized checkpoints, and this one is "
            "not; omit it, and use quantization='int8' or 'int8-weight-only' to quantize it"
        )
    if options.target == "npu" and (unpacked := unpack_latent_attention(model)):
        log.warning(
            "unpacked %d quantized weights of latent attention, beginning with %s", len(unpacked), unpacked[0]
        )
    dump.begin(report.model)
    with timed(report.seconds):
        if repeat is None:
            found = _with_few_layers(model, options, reference, report, compares_all or options.world_size > 1)
        else:
            found = _with_loaded_layers(repeat, options, reference, report)
        if found is None:
            # The reference comes first: some models settle into their final form at the first call.
            if reference is None and options.verify != "off":
                reference = reference_of_model(model)
            captured = capture(model)
            dump.write_graph(captured.traced, "captured")
            found = captured, rewrite(captured, options, References(reference), report), References(reference)
        for remark in (remark for record in report.passes for remark in record.remarks):
            log.warning("%s: %s", report.model, remark)
        return found


def _with_few_layers(
    model: nn.Module,
    options: CompileOptions,
    reference: Reference | None,
    report: CompileReport,
    compares_all: bool,
) -> tuple[Captured, Rewritten, References] | None:
    """Capture and rewrite with one layer compiled for all equal ones, and verify the result; None if that is
    impossible.
    """
    if options.verify not in ("model", "full") or dump.is_on() or options.patterns or registered_passes():
        return None
    if options.target != "cpu":
        return None
    repeat = LayerRepeat.of(model)
    if repeat is None:
        return None
    try:
        compares_few = reference is None and options.verify == "model"
        if reference is None and (compares_all or not compares_few):
            reference = reference_of_model(model, SHORT_SCHEDULE if compares_few else None)
            tensors = list(model.parameters())
            FilePages(tensors).drop_tensors(tensors)  # what follows reads a few layers
        return _shortened(repeat, options, References(reference), report, compares_few)
    except (CannotRepeat, UnsupportedModel) as error:
        log.info("compiling all layers of %s: %s", report.model, error)
        fresh = CompileReport(report.model, seconds=report.seconds)
        vars(report).update(vars(fresh))
        return None


def _with_loaded_layers(
    repeat: LayerRepeat, options: CompileOptions, reference: Reference | None, report: CompileReport
) -> tuple[Captured, Rewritten, References]:
    """The same of a model of which these layers alone are loaded.

    Raises:
        UnsupportedModel: they cannot stand for the others.
    """
    references = References(reference, is_loaded=False)
    try:
        return _shortened(repeat, options, references, report, compares_few=reference is not None)
    except (CannotRepeat, UnsupportedModel) as error:
        raise UnsupportedModel(
            f"{report.model} does not fit into this host's memory, and {repeat.kept} of its {repeat.total} layers "
            f"cannot be compiled for all: {error}"
        ) from error


def _shortened(
    repeat: LayerRepeat, options: CompileOptions, references: References, report: CompileReport, compares_few: bool
) -> tuple[Captured, Rewritten, References]:
    """Capture and rewrite the kept layers; with ``compares_few``, they are compared with the model's first layers."""
    check_recurrent_modules(repeat.model)  # those of the layers that are left out, too
    with repeat.shortened():
        if compares_few:
            references = replace(references, shallow=reference_of_model(repeat.model))
        captured = replace(capture(repeat.model), repeat=repeat)
    captured.traced.notes.of_layers = repeat.inputs_of_layers(captured.traced)
    graphs = rewrite(captured, options, references, report)
    report.layers_compiled = repeat.kept
    return captured, graphs, references


def finish(built: Built, *, owns_weights: bool) -> None:
    """The second part: pack the weights, if the options request it. One of several ranks computes nothing alone, so
    nothing is compared."""
    if built.traced.npu is not None:
        return
    if built.options.world_size > 1:
        with timed(built.program.report.seconds):
            if built.options.packs or built.program.has_stored_weights:
                built.program.pack_weights(release=owns_weights)
        return
    report = built.program.report
    with timed(report.seconds):
        if built.options.packs or built.program.has_stored_weights:
            _pack(built, report, owns_weights)
        if built.options.batch_invariant and built.is_compared and not built.options.quantization:
            verdict = built.check()
            if not verdict.ok:
                raise UnsupportedModel(f"{report.model}: with batch_invariant=True {verdict.reason}; omit it")
            report.verdict = verdict
        if built.reference is None and built.shallow is not None:
            built.reference = _own_reference(built.program, built.shallow.of_all)


def _own_reference(program: LinkedProgram, like: Reference) -> Reference:
    """The logits of a program of all layers, of which few were compared with the model, for later starts.

    Raises:
        UnsupportedModel: the program yields others where it computes them in chunks.
    """
    reference = reference_of_program(program, like)
    verdict = check(program, reference, weight_bits=program.weight_bits)
    if not verdict.ok:
        raise UnsupportedModel(
            f"{program.report.model}: a prompt in chunks and decode steps give other logits than in one step "
            f"({verdict.reason}). Please report the model; verify='full' compares all layers"
        )
    return reference


def _pack(built: Built, report: CompileReport, release: bool) -> None:
    """Pack the weights of a verified program and verify it again.

    Raises:
        UnsupportedModel: the packed program, or a quantized weight, is wrong.
    """
    program = built.program
    size = program.pack_weights(release=release, check=built.is_compared)
    kept = "in place of" if release else "in addition to"
    log.info("packed %.2f GiB of weights %s the model's own", size / 2**30, kept)
    if built.is_compared and size:
        verdict = built.check(weight_bits=program.weight_bits)
        if not verdict.ok:
            how, remedy = "packed", "give pack_weights=False"
            if program.weight_bits is not None:
                how = "rounded"
                remedy = "omit quantization" if built.options.quantization else "use input_bits=16"
            if built.shallow is not None:
                remedy += ", or verify='full' to compile all layers if they differ"
            raise UnsupportedModel(f"{report.model}: with {how} weights {verdict.reason}; {remedy}")
        report.verdict = verdict


def _link_inductor(
    linked: Linked,
    captured: Captured,
    traced: TracedGraph,
    reference: Reference | None,
    report: CompileReport,
) -> LinkedProgram:
    try:
        run = generate_code(traced, captured.context)
    except Exception as error:  # no C++ compiler, no room on the disk, a bug of inductor
        log.warning("inductor failed; running the rewritten graph uncompiled, which is slower: %s", first_line(error))
        report.dropped_passes.append(("inductor", first_line(error)))
        return linked(call_kernels(traced))
    program = linked(run)
    report.codegen = "inductor"
    if reference is not None:
        verdict = check(program, reference)
        if not verdict.ok:
            log.warning("rejecting inductor's code: %s; running the rewritten graph uncompiled", verdict.reason)
            report.dropped_passes.append(("inductor", verdict.reason))
            report.codegen = "none"
            return linked(call_kernels(traced))
        report.verdict = verdict
    return program
