"""A linked program as plain data: its graph, what its inputs receive, and how compiling it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from ...passes import PassRecord, Rejection, TracedGraph
from ...passes.packed_weights import PackedWeight
from ...passes.record import Route
from ...runtime.ops.quantized_weight import Quantization
from ...runtime.program import CacheSpec
from ..linkage import Linkage
from ..linker import LinkedProgram
from ..merged_weights import merge_inputs
from ..report import CompileReport, PassCheck, Verdict
from ..targets.cpu.kernels import kernel_calls
from .fingerprint import module_tensors, tensor_digest
from .graph_data import CannotStore, from_data, to_data

_MOST_BYTES = 64 << 20
"""Tensors that passes made, together: tables and masks, not weights."""


class Outdated(Exception):
    """A stored program does not fit the module. The message says why."""


def describe(traced: TracedGraph, linkage: Linkage, model: nn.Module) -> dict[str, Any]:
    """All of a linked program but its report, before its weights are packed.

    Raises:
        CannotStore: a part of it has no plain form.
    """
    names = {id(tensor): name for name, tensor in module_tensors(model).items()}
    weights: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name in linkage.inputs:
        tensor = traced.constants.get(name)
        if tensor is None or name in linkage.merged:
            continue
        if id(tensor) in names:
            weights[name] = names[id(tensor)]
        elif (view := _view_of_weight(tensor, model)) is not None:
            weights[name] = view
        else:
            tensors[name] = tensor.detach()
    if sum(t.numel() * t.element_size() for t in tensors.values()) > _MOST_BYTES:
        raise CannotStore(f"its tables are larger than {_MOST_BYTES >> 20} MiB")
    return {
        "graph": to_data(traced.graph),
        "linkage": _linkage_data(linkage),
        "weights": weights,
        "tensors": tensors,
        "digests": {name: tensor_digest(traced.constants[name]) for name in linkage.folded},
    }


def restore(data: Mapping[str, Any], model: nn.Module) -> LinkedProgram:
    """The program of ``describe`` over the weights of ``model``, whose parameters may become views of merged ones.

    Raises:
        Outdated: the module's tensors are not those that the program was made for.
    """
    linkage = _linkage(data["linkage"])
    named = module_tensors(model)
    constants: dict[str, torch.Tensor] = dict(data["tensors"])
    for name, source in data["weights"].items():
        weight, view = (source, None) if isinstance(source, str) else source
        if weight not in named:
            raise Outdated(f"the model has no tensor {weight!r}")
        tensor = named[weight]
        constants[name] = tensor if view is None else _view(tensor, view)
    for name, digest in data["digests"].items():
        if tensor_digest(constants[name]) != digest:
            raise Outdated(f"constants were computed from other values of {data['weights'].get(name, name)!r}")
    run = kernel_calls(from_data(data["graph"]))
    merge_inputs(linkage.merged, constants)
    return LinkedProgram(linkage, constants, run, report_from_data(data["report"]))


def _view_of_weight(tensor: torch.Tensor, model: nn.Module) -> tuple[str, tuple[Any, ...]] | None:
    """The parameter that all elements of ``tensor`` are in, with the sizes, strides and offset that it has there."""
    storage = tensor.untyped_storage().data_ptr()
    for name, weight in module_tensors(model).items():
        offset = tensor.storage_offset() - weight.storage_offset()
        if (
            storage
            and weight.untyped_storage().data_ptr() == storage
            and weight.dtype == tensor.dtype
            and offset == 0
            and weight.numel() == tensor.numel()
        ):
            return name, (tuple(tensor.shape), tensor.stride())
    return None


def _view(weight: torch.Tensor, view: tuple[Any, ...]) -> torch.Tensor:
    sizes, strides = view
    return weight.detach().as_strided(sizes, strides, weight.storage_offset())


def _linkage_data(linkage: Linkage) -> dict[str, Any]:
    plain = {f.name: getattr(linkage, f.name) for f in fields(Linkage)}
    plain["read"] = sorted(linkage.read)
    plain["caches"] = [asdict(spec) for spec in linkage.caches]
    plain["merged"] = dict(linkage.merged)
    plain["packed"] = [
        (p.name, p.sources, None if p.quantization is None else asdict(p.quantization)) for p in linkage.packed
    ]
    plain["device"] = str(linkage.device)
    return plain


def _linkage(plain: Mapping[str, Any]) -> Linkage:
    packed = tuple(
        PackedWeight(name, tuple(sources), None if q is None else Quantization(**q))
        for name, sources, q in plain["packed"]
    )
    return Linkage(
        **{
            **plain,
            "read": frozenset(plain["read"]),
            "caches": tuple(CacheSpec(**spec) for spec in plain["caches"]),
            "packed": packed,
            "device": torch.device(plain["device"]),
        }
    )


def report_data(report: CompileReport) -> dict[str, Any]:
    """A report as plain data."""
    return asdict(report)


def report_from_data(plain: Mapping[str, Any]) -> CompileReport:
    """The report of ``report_data``; its seconds are those that compiling took."""
    verdict = plain["verdict"]
    return CompileReport(
        **{
            **plain,
            "passes": [_record(record) for record in plain["passes"]],
            "verdict": None if verdict is None else Verdict(**verdict),
            "dropped_passes": [(name, why) for name, why in plain["dropped_passes"]],
            "checks": [PassCheck(**check) for check in plain["checks"]],
        }
    )


def _record(plain: Mapping[str, Any]) -> PassRecord:
    rejections = [Rejection(**rejection) for rejection in plain["rejections"]]
    routes = [
        Route(**{**route, "chosen": tuple(route["chosen"]), "refused": tuple(map(tuple, route["refused"]))})
        for route in plain["routes"]
    ]
    return PassRecord(**{**plain, "rejections": rejections, "routes": routes})
