"""``torch.compile(model, backend="pagoda")``: flash attention inside the user's own call and cache handling."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensor

from ..passes import PassRecord, TracedGraph, UnsupportedModel
from ..passes.fx_nodes import value
from .options import CompileOptions
from .pipeline import run_passes, selected_passes
from .verify import TOLERANCE

log = logging.getLogger(__name__)

_TRAINING_WARNING = (
    "pagoda compiles for inference only: this graph {why}, so it goes to inductor unrewritten. "
    "Call the model under torch.inference_mode() and in eval mode to have it rewritten."
)
_warned_of_training = False


def pagoda(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: recognise attention in a Dynamo graph and hand the rest to inductor.

    Works with whatever cache the caller keeps (none, DynamicCache, StaticCache): masks stay tensors and cache
    updates stay where they are. For paged caches and batching see ``torch_pagoda.LLM`` and ``torch_pagoda.compile``.

    Args:
        gm: Dynamo's graph, parameters as inputs.
        example_inputs: their values.
        mode: only None or "default".
        options: see ``CompileOptions``.

    Raises:
        ValueError: an unknown option or another mode.
    """
    if mode not in (None, "default"):
        raise ValueError(f"mode={mode!r} is not supported by backend 'pagoda'; leave it out or use options={{...}}")
    parsed = CompileOptions.from_dict(options)
    if parsed.pack_weights:
        raise ValueError(
            "pack_weights=True is not for backend 'pagoda', where the weights stay the caller's; leave it out, or "
            "use torch_pagoda.compile or torch_pagoda.LLM"
        )
    why = _training_reason(example_inputs)
    if why:
        _warn_of_training(why)
        return cast("Callable[..., Any]", compile_fx(gm, example_inputs))
    rewritten = _rewrite(gm, example_inputs, parsed)
    parameters = sum(x.numel() for x in example_inputs if isinstance(x, nn.Parameter))
    if not parsed.uses_inductor(parameters):
        return rewritten.forward
    return cast("Callable[..., Any]", compile_fx(rewritten, example_inputs))


def _training_reason(example_inputs: list[Any]) -> str:
    """Why this is a training graph, or ""."""
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
        return "has grad mode on and an input or parameter that requires grad"
    if any(part.training for module in _traced_modules() for part in module.modules()):
        return "comes from a module in train()"
    return ""


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
    return [v for v in visible.values() if isinstance(v, nn.Module)]


def _warn_of_training(why: str) -> None:
    global _warned_of_training
    if not _warned_of_training:
        _warned_of_training = True
        warnings.warn(_TRAINING_WARNING.format(why=why), stacklevel=2)


def _rewrite(gm: fx.GraphModule, example_inputs: list[Any], options: CompileOptions) -> fx.GraphModule:
    """The rewritten graph module; ``gm`` itself when nothing matched or the check refuses the rewrite.

    A pass that fails is left out; with verify="every-pass" so is one that changes the numbers.
    """
    fakes = [v for n in gm.graph.nodes if isinstance(v := value(n), FakeTensor)]
    if not fakes:
        return gm
    traced = TracedGraph(gm, fakes[0].fake_mode, {}, paged=False).copy()
    records: list[PassRecord] = []
    for entry in selected_passes(options):
        before, reason = traced.copy(), ""
        try:
            applied = run_passes(traced, [entry])
            if options.verify == "every-pass" and applied[0].matches:
                reason = _difference(gm, traced.module, example_inputs)
        except UnsupportedModel as error:
            reason = str(error)
        if reason:
            log.warning("pass %s is left out: %s", entry.name, reason)
            traced = before
        else:
            records += applied
    traced.recompile()
    for record in records:
        log.debug("%s: %d matches, %d near misses", record.name, record.matches, len(record.rejections))
        for rejection in record.rejections:
            log.info("%s left %s alone: %s", record.name, rejection.module or rejection.node, rejection.reason)
    if not any(record.matches for record in records):
        return gm
    if options.verify != "off":
        reason = _difference(gm, traced.module, example_inputs)
        if reason:
            log.warning("the rewritten graph is not used: %s", reason)
            return gm
    return traced.module


def _difference(original: fx.GraphModule, rewritten: fx.GraphModule, example_inputs: list[Any]) -> str:
    """How the two graphs differ on the example inputs, or ""."""
    if any(isinstance(x, FakeTensor) for x in example_inputs):
        return ""
    with torch.no_grad():
        expected = original(*_fresh(example_inputs))
        found = rewritten(*_fresh(example_inputs))
    for a, b in zip(expected, found, strict=True):
        if not isinstance(a, torch.Tensor) or not a.is_floating_point() or not a.numel():
            continue
        spread = a.float().std().clamp_min(1e-6) if a.numel() > 1 else a.float().abs().clamp_min(1e-6)
        error = float(((a.float() - b.float()).abs().max() / spread).nan_to_num(nan=float("inf")))
        tolerance = TOLERANCE.get(a.dtype, 0.3)
        if error > 3 * tolerance:
            return f"its outputs differ by {error:.3g} standard deviations (limit {3 * tolerance})"
    return ""


def _fresh(inputs: list[Any]) -> list[Any]:
    """Inputs to run a graph on without the caller seeing its in-place writes; sizes without new guards."""

    def one(x: Any) -> Any:
        if isinstance(x, torch.SymInt):
            return x.node.hint
        if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter):
            return x.detach().clone()
        return x

    return [one(x) for x in inputs]
