"""``torch.compile(model, backend="pagoda")``: attention and fusions in the user's own forward call and cache."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..passes import PassRecord, TracedGraph, UnsupportedModel
from ..passes.graph.fx_nodes import callee, value
from ..runtime.phases import logged
from .capture.exchanged_functions import keep_exchanged
from .capture.module_scalars import recover_module_scalars
from .option_conflicts import check_conflicts
from .options import CompileOptions, selected_passes
from .pass_runs import apply_one_by_one
from .targets.cpu.inductor import generate_code, is_fusible
from .targets.cpu.kernels import call_kernels
from .targets.npu.ge.ge_route import GeGraphs
from .verify import dump
from .verify.drop_in_check import difference
from .weights.merged_weights import AddedArguments, link_merged_weights

log = logging.getLogger(__name__)

_TRAINING_WARNING = (
    "pagoda compiles for inference only: this graph {why}, so inductor compiles it unmodified. "
    "Call the model in eval mode under torch.inference_mode() to optimize it."
)
_warned_of_training = False


@logged()
def pagoda(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: recognize attention in a Dynamo graph, fuse operators of its ATen graph, and compile it with
    inductor.

    Works with any cache of the caller (none, DynamicCache, StaticCache): masks stay tensors and cache updates stay
    unchanged. For paged caches and batching see ``torch_pagoda.LLM`` and ``torch_pagoda.compile``.

    Args:
        gm: Dynamo's graph, parameters as inputs.
        example_inputs: example values of the inputs.
        mode: only None or "default".
        options: see ``CompileOptions``.

    Raises:
        ValueError: an unknown option or another mode.
    """
    if mode not in (None, "default"):
        raise ValueError(f"mode={mode!r} is not supported by backend 'pagoda'; omit it or use options={{...}}")
    parsed = CompileOptions.from_dict(options)
    check_conflicts(vars(parsed), backend="pagoda")
    if parsed.target != "npu" and "codegen" not in (options or {}):
        parsed = replace(parsed, codegen="inductor")
    keep_exchanged(gm)
    parsed = parsed.for_device(next((x.device.type for x in example_inputs if isinstance(x, torch.Tensor)), "cpu"))
    why = _training_reason(example_inputs)
    if why:
        _warn_of_training(why)
        return cast("Callable[..., Any]", compile_fx(gm, example_inputs))
    if _is_autocast(gm, example_inputs):
        # What is recognized has one dtype throughout; autocast chooses one for every operator.
        log.warning(
            "this graph runs under torch.autocast, so inductor compiles it unmodified; load the model in its compute "
            "dtype and remove autocast to optimize it"
        )
        return cast("Callable[..., Any]", compile_fx(gm, example_inputs))
    recover_module_scalars(gm)
    rewritten = _rewrite(gm, example_inputs, parsed)

    def finish(aten: fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
        with unset_fake_temporarily():
            return make_boxed_func(_fuse(aten, fakes, example_inputs, parsed))

    with torch.no_grad():
        fused = aot_module_simplified(
            rewritten, example_inputs, fw_compiler=finish, decompositions={}, keep_inference_input_mutations=True
        )
    return cast("Callable[..., Any]", fused)


def _training_reason(example_inputs: list[Any]) -> str:
    """The reason to treat this as a training graph, or ""."""
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
        return "has grad mode on and an input or parameter that requires grad"
    if any(part.training for module in _traced_modules() for part in module.modules()):
        return "belongs to a module in train() mode"
    return ""


def _is_autocast(gm: fx.GraphModule, example_inputs: list[Any]) -> bool:
    """True if autocast is on around the graph or enabled within it."""
    devices = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    if any(torch.is_autocast_enabled(device) for device in devices):
        return True
    entered = [n for n in gm.graph.nodes if callee(n) == "_enter_autocast"]
    return any(len(node.args) < 3 or node.args[2] for node in entered)


def _traced_modules() -> list[nn.Module]:
    """The modules that the frame being compiled can name: the model, or what a function calls."""
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return []
    visible = dict(getattr(translator, "f_locals", {}))
    names = getattr(getattr(translator, "f_code", None), "co_names", ())
    module_globals = getattr(translator, "f_globals", {})
    visible |= {name: module_globals[name] for name in names if name in module_globals}
    found = [v for v in visible.values() if isinstance(v, nn.Module)]
    # A decorator of forward has the module among its *args.
    return found + [
        v for given in visible.values() if isinstance(given, tuple) for v in given if isinstance(v, nn.Module)
    ]


def _warn_of_training(why: str) -> None:
    global _warned_of_training
    if not _warned_of_training:
        _warned_of_training = True
        warnings.warn(_TRAINING_WARNING.format(why=why), stacklevel=2)


def _rewrite(gm: fx.GraphModule, example_inputs: list[Any], options: CompileOptions) -> fx.GraphModule:
    """The rewritten graph module; ``gm`` itself if nothing matched or the check rejects the rewrite.

    Failing passes are dropped, with verify="every-pass" also those that change the logits.
    """
    fakes = [v for n in gm.graph.nodes if isinstance(v := value(n), FakeTensor)]
    if not fakes:
        return gm
    traced = TracedGraph(gm, fakes[0].fake_mode, {}, paged=False).copy()
    dump.begin("drop_in")
    dump.write_graph(traced, "captured")
    traced, records = _applied(
        traced, "dynamo", options, lambda candidate: difference(gm, candidate.module, example_inputs)
    )
    _log(records)
    if not any(record.matches for record in records):
        return gm
    if options.verify != "off":
        reason = difference(gm, traced.module, example_inputs)
        if reason:
            log.warning("the rewritten graph is not used: %s", reason)
            return gm
    return traced.module


def _applied(
    traced: TracedGraph, stage: str, options: CompileOptions, compare: Callable[[TracedGraph], str]
) -> tuple[TracedGraph, list[PassRecord]]:
    """Apply the passes of one stage, dropping those that fail.

    Args:
        traced: the graph; modified in place.
        stage: "dynamo" or "aten".
        options: select the passes, and whether to compare after each.
        compare: returns how a graph's outputs are wrong, or "".
    """
    records: list[PassRecord] = []

    def refusal(index: int, before: TracedGraph, after: TracedGraph | UnsupportedModel) -> str:
        if isinstance(after, UnsupportedModel):
            return str(after)
        return compare(after) if options.verify == "every-pass" else ""

    return apply_one_by_one(traced, selected_passes(options, stage), refusal, records), records


def _log(records: list[PassRecord]) -> None:
    for record in records:
        log.debug("%s: %d matches, %d near misses", record.name, record.matches, len(record.rejections))
        for rejection in record.rejections:
            log.info("%s left %s alone: %s", record.name, rejection.module or rejection.node, rejection.reason)


def _fuse(
    gm: fx.GraphModule, fakes: list[Any], example_inputs: list[Any], options: CompileOptions
) -> Callable[..., Any]:
    """Apply the passes on an ATen graph and make it callable.

    Args:
        gm: AOTAutograd's graph for inference.
        fakes: its inputs, fake.
        example_inputs: the real inputs of the graph that it was traced from.
        options: as given.
    """
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    mode = next((v.fake_mode for v in fakes if isinstance(v, FakeTensor)), None)
    parameters = sum(x.numel() for x in example_inputs if isinstance(x, nn.Parameter))
    if mode is None:
        return gm.forward
    original = TracedGraph(gm, mode, {}, paged=False, npu=options.npu_target() if options.target == "npu" else None)
    # AOTAutograd may join inputs that alias: then the inputs behind the placeholders are not known.
    real = list(example_inputs) if len(original.placeholders) == len(example_inputs) else []
    if any(isinstance(x, FakeTensor) for x in real):
        real = []
    for node, x in zip(original.placeholders, real, strict=False):
        if isinstance(x, nn.Parameter):
            original.constants[node.name] = x

    def refusal(candidate: TracedGraph) -> str:
        if not real:
            return ""
        link_merged_weights(candidate)
        added = AddedArguments(candidate, len(original.placeholders))
        return difference(gm, candidate.module, real, added.tensors)

    traced, records = _applied(original.copy(), "aten", options, refusal)
    _log(records)
    if options.verify != "off" and any(record.matches for record in records):
        reason = refusal(traced)
        if reason:
            log.warning("the fused graph is not used: %s", reason)
            traced = original
    link_merged_weights(traced)
    added = AddedArguments(traced, len(original.placeholders))
    # In a tracing context apart from the one that the caller's graph is traced in.
    if traced.npu is None and options.uses_inductor(parameters, is_fusible(traced)):
        run = generate_code(traced, TracingContext(mode))
    elif options.codegen == "ge":
        run = GeGraphs(traced, options=options.npu_options)
    else:
        run = call_kernels(traced)

    def fused(*args: Any) -> Any:
        added.check(args)
        return run(*args, *added.tensors)

    return fused if added.tensors else run
