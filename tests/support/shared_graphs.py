"""Traced and rewritten graphs that the tests of a process share: tracing is nearly all of a tiny model's compile
time.

Shared are the captured graph, what the passes on Dynamo's graph make of it, the ATen graph of that, and what passes
that are not for an NPU make of that one. The first test that compiles a model does all of it; for the next one that
compiles an equal model with the same options these are copies over its own tensors, and the passes that lower a graph
or hold its weights, the checks and linking run as ever. Two models are equal where the product's identity
describes their modules and code alike; two graphs where all nodes are, and for the passes every byte of their
tensors, too, and all that the modules of passes have names for, which a test may have patched. Captured graphs are
also kept on a disk, as ``graphs_on_disk.py`` says; nothing else outlives the process.

``tests/conftest.py`` lets the compiler take these graphs in all tests. What calls ``capture.trace.capture`` or a pass
by itself runs it.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import TracingContext

from torch_pagoda.compiler import build, pass_runs, pipeline
from torch_pagoda.compiler.capture import aten, trace
from torch_pagoda.compiler.capture.trace import Captured
from torch_pagoda.compiler.live_module.describer import CannotIdentify, Describer
from torch_pagoda.compiler.live_module.forward_reads import ForwardReads
from torch_pagoda.compiler.pass_runs import run_passes as run_passes_anew
from torch_pagoda.compiler.verify import dump
from torch_pagoda.compiler.warm_start.identity import add_model, modes
from torch_pagoda.compiler.weights.tensor_contents import module_tensors, update_whole
from torch_pagoda.passes import PASSES, Pass, PassRecord, TracedGraph
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.phases import phase

from graphs_on_disk import GraphsOnDisk


@dataclass
class _Kept:
    """A graph without its tensors.

    Attributes:
        graph: it.
        tensors: graph input → what the tensor is called where it comes from, or one that was computed.
        more: what was returned beside the graph.
    """

    graph: TracedGraph
    tensors: dict[str, str | torch.Tensor]
    more: Any = None

    @classmethod
    def of(cls, graph: TracedGraph, named: dict[str, torch.Tensor], more: Any = None) -> _Kept | None:
        """None where an input receives a part of a named tensor, which has no name of its own."""
        names = {id(tensor): name for name, tensor in named.items()}
        places = {tensor.untyped_storage().data_ptr() for tensor in named.values()}
        tensors: dict[str, str | torch.Tensor] = {}
        for name, tensor in graph.constants.items():
            if id(tensor) in names:
                tensors[name] = names[id(tensor)]
            elif tensor.untyped_storage().data_ptr() in places:
                return None
            else:
                tensors[name] = tensor.clone()
        kept = graph.copy()
        kept.constants = {}
        return cls(kept, tensors, more)

    def over(self, named: dict[str, torch.Tensor]) -> TracedGraph:
        """A copy over other tensors."""
        graph = self.graph.copy()
        graph.constants = {k: named[v] if isinstance(v, str) else v.clone() for k, v in self.tensors.items()}
        graph.recompile()
        return graph


_APART = ("module", "fake_mode", "constants", "quantization", "npu", "_origin")
"""Attributes of a ``TracedGraph`` that are told by its nodes, or that no shared pass reads; of an NPU these ask no
more than whether there is one."""
_alive: dict[str, list[Any]] = {}
_kept: dict[Any, _Kept | None] = {}
_on_disk: GraphsOnDisk | None = None
hits = {"capture": 0, "passes": 0, "aten": 0}


def capture(model: nn.Module) -> Captured:
    """As ``capture.trace.capture``; an equal model is traced once."""
    stored = any(isinstance(parameter, StoredWeight) for parameter in model.parameters())
    key = None if stored else _key_of_model(model)
    if key is None:
        return trace.capture(model)
    named = module_tensors(model)
    if key not in _kept:
        found = None if _on_disk is None else _on_disk.load(key)
        if found is None:
            captured = trace.capture(model)
            _kept[key] = kept = _Kept.of(captured.traced, named, captured.context)
            if _on_disk is not None and kept is not None:
                _on_disk.save(key, kept.graph, kept.tensors, kept.more)
            return captured
        _kept[key] = _Kept(*found)
    if (kept := _kept[key]) is None:
        return trace.capture(model)
    hits["capture"] += 1
    with phase("capture"):
        return Captured(kept.over(named), kept.more)


def run_passes(traced: TracedGraph, passes: Sequence[Pass]) -> list[PassRecord]:
    """As ``pass_runs.run_passes``; those that are not for an NPU and hold no weights are applied to an equal graph
    once."""
    stored = any(isinstance(tensor, StoredWeight) for tensor in traced.constants.values())
    apart = any(entry.stage == "weights" or entry.target == "npu" or entry not in PASSES for entry in passes)
    if len(passes) < 2 or stored or apart or dump.is_on():
        return run_passes_anew(traced, passes)
    given = {name: field for name, field in vars(traced).items() if name not in _APART}
    contents = hashlib.sha256()
    for tensor in traced.constants.values():
        update_whole(contents, tensor)
    graph = _key_of_graph(traced), f"{given}", traced.npu is None, contents.hexdigest()
    key = (*graph, *(entry.name for entry in passes), _code_of_passes())
    named = dict(traced.constants)
    if key not in _kept:
        records = _run_for_any_npu(traced, passes)
        _kept[key] = _Kept.of(traced, named, copy.deepcopy(records))
        return records
    if (kept := _kept[key]) is None:
        return run_passes_anew(traced, passes)
    hits["passes"] += 1
    own = {name: getattr(traced, name) for name in ("quantization", "npu")}
    vars(traced).update({**vars(kept.over(named)), **own})
    return copy.deepcopy(kept.more)


def _run_for_any_npu(traced: TracedGraph, passes: Sequence[Pass]) -> list[PassRecord]:
    """As ``run_passes``, over an NPU that nothing can be asked of: what they make is shared by all chips."""
    npu = traced.npu
    traced.npu = None if npu is None else object()  # type: ignore[assignment]
    try:
        return run_passes_anew(traced, passes)
    finally:
        traced.npu = npu


def _code_of_passes() -> str:
    """A digest of all that the modules of passes and of their operators have names for, and of their classes, which a
    test may have patched; not of what lists and dicts hold. It stays alive, so that no ``id`` is used twice."""
    found: list[Any] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch_pagoda.passes", "torch_pagoda.runtime.ops")):
            values = list(vars(module).values())
            for kind in values.copy():
                if isinstance(kind, type) and kind.__module__ == name:
                    values += [x for key, x in vars(kind).items() if not key.startswith("__")]
            found += values
    digest = hashlib.sha256(f"{list(map(id, found))}".encode()).hexdigest()
    _alive.setdefault(digest, found)
    return digest


def to_aten(traced: TracedGraph, context: TracingContext) -> TracedGraph:
    """As ``capture.aten.to_aten``; an equal graph is traced once."""
    key = ("aten", *_key_of_graph(traced))
    if key not in _kept:
        result = aten.to_aten(traced, context)
        _kept[key] = _Kept(replace(result.copy(), constants={}), {})
        return result
    hits["aten"] += 1
    kept = _kept[key]
    assert kept is not None
    with phase("aten"):
        return traced.over(kept.graph.copy().module)


def share_graphs(patch: pytest.MonkeyPatch, on_disk: GraphsOnDisk | None = None) -> None:
    """Let the compiler take shared graphs until the patch is undone; with captured ones that are kept on a disk."""
    patch.setattr(sys.modules[__name__], "_on_disk", on_disk)
    explain = import_module("torch_pagoda.reports.explain")  # hidden by the function of that name
    patch.setattr(build, "capture", capture)
    for module in (pass_runs, pipeline):
        patch.setattr(module, "run_passes", run_passes)
    patch.setattr(pipeline, "to_aten", to_aten)
    patch.setattr(explain, "capture", capture)
    patch.setattr(explain, "to_aten", to_aten)


class _Describer(Describer):
    """Says which tensors are one, but neither what is in them, which tracing does not read, nor which lie together in
    memory: linking moves weights."""

    def _add_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        places: dict[int, int] = {}
        for name, tensor in tensors.items():
            plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
            if not plain or tensor.device.type != "cpu":
                raise CannotIdentify(name)
            place = places.setdefault(tensor.data_ptr(), len(places))
            form = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, tensor.is_inference()
            self.say(type(tensor).__name__, f"{name} {place} {form}")


def _key_of_model(model: nn.Module) -> str | None:
    """None for a model that cannot be described."""
    try:
        reads = ForwardReads(model)
        describer = _Describer(reads.runs)
        describer.add((torch.get_default_dtype(), *modes()))
        add_model(describer, model, reads)
        return describer.digest()
    except Exception:
        return None


def _key_of_graph(traced: TracedGraph) -> tuple[Any, ...]:
    """All of a graph but what is in its tensors."""
    digest = hashlib.sha256()
    for node in traced.graph.nodes:
        target = node.target if isinstance(node.target, str) else id(node.target)
        scopes = node.meta.get("nn_module_stack"), node.meta.get("stack_trace")
        digest.update(f"{node.op} {node.name} {target} {node.args} {node.kwargs} {scopes}\0".encode())
        digest.update(f"{_form(node.meta.get('example_value'))}\0".encode())
    return traced.fake_mode, torch.is_inference_mode_enabled(), digest.hexdigest(), *traced.constants


def _form(example: Any) -> Any:
    if isinstance(example, torch.Tensor):
        return example.dtype, example.device, tuple(example.shape), example.stride()
    return [_form(item) for item in example] if isinstance(example, (list, tuple)) else example
