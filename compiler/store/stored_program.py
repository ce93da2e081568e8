"""A linked program as plain data: its graph, what its inputs receive, and how compiling it went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ...passes import TracedGraph
from ...runtime.ops.linear.stored_weight import StoredWeight
from ..fingerprint.tensor_contents import module_tensors, tensor_digest
from ..link.linkage import Linkage
from ..link.linker import LinkedProgram
from ..report import CompileReport
from ..targets.cpu.kernels import kernel_calls
from ..weights.merged_weights import merge_inputs
from .graph_data import CannotStore, from_data, to_data
from .linkage_check import check_linkage
from .typed_data import from_plain, to_plain

_MOST_BYTES = 64 << 20
"""Tensors that passes made, together: tables and masks, not weights."""


View = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


@dataclass(frozen=True)
class StoredProgram:
    """What a file holds of a program.

    Attributes:
        graph: see ``graph_data.to_data``.
        linkage: what its inputs receive.
        weights: input → the module's tensor that it receives, or a view of it.
        tensors: input → what passes made for it.
        digests: of the constants that others were computed from.
        report: how compiling went.
    """

    graph: list[Any]
    linkage: Linkage
    weights: dict[str, str | tuple[str, View]]
    tensors: dict[str, torch.Tensor]
    digests: dict[str, str]
    report: CompileReport


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
        elif isinstance(tensor, StoredWeight):
            raise CannotStore(f"{name} is a view of a quantized weight")
        elif (view := _view_of_weight(tensor, model)) is not None:
            weights[name] = view
        else:
            tensors[name] = tensor.detach()
    if sum(t.numel() * t.element_size() for t in tensors.values()) > _MOST_BYTES:
        raise CannotStore(f"its tables are larger than {_MOST_BYTES >> 20} MiB")
    return {
        "graph": to_data(traced.graph),
        "linkage": to_plain(linkage),
        "weights": weights,
        "tensors": tensors,
        "digests": {name: tensor_digest(traced.constants[name]) for name in linkage.folded},
    }


def restore(data: Mapping[str, Any], named: Mapping[str, torch.Tensor], *, merge: bool = True) -> LinkedProgram:
    """The program of ``describe`` over the weights of a module, which may become views of merged ones.

    Args:
        data: of a ``StoredProgram``, from a file.
        named: tensors of the module by name, those that it reads at least.
        merge: lay those that are merged out one after the other now; else packing does that for the ones that it
            packs, one at a time.

    Raises:
        Outdated: the module's tensors are not those that the program was made for.
        ValueError: the data is not a program; nothing of it has been run.
    """
    stored = _read(data)
    linkage = stored.linkage
    constants: dict[str, torch.Tensor] = dict(stored.tensors)
    for name, source in stored.weights.items():
        weight, view = (source, None) if isinstance(source, str) else source
        if weight not in named:
            raise Outdated(f"the model has no tensor {weight!r}")
        tensor = named[weight]
        constants[name] = tensor if view is None else _view(tensor, view)
    module = from_data(stored.graph)
    placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    check_linkage(linkage, placeholders, constants)
    if stored.digests.keys() != set(linkage.folded):
        raise ValueError("the digests are not those of the constants that others were computed from")
    for name, digest in stored.digests.items():
        if tensor_digest(constants[name]) != digest:
            raise Outdated(f"constants were computed from other values of {stored.weights.get(name, name)!r}")
    run = kernel_calls(module)
    later = () if merge else {packed.name for packed in linkage.packed}
    merge_inputs({name: rows for name, rows in linkage.merged.items() if name not in later}, constants)
    return LinkedProgram(linkage, constants, run, stored.report)


def tensors_read(data: Mapping[str, Any]) -> list[str]:
    """Names of the module's tensors that the program of ``describe`` reads.

    Raises:
        ValueError: the data is not a program.
    """
    return [source if isinstance(source, str) else source[0] for source in _read(data).weights.values()]


def _read(data: Mapping[str, Any]) -> StoredProgram:
    plain = {f.name: data.get(f.name) for f in fields(StoredProgram)}
    stored: StoredProgram = from_plain(StoredProgram, plain, "the program")
    return stored


def _view_of_weight(tensor: torch.Tensor, model: nn.Module) -> tuple[str, View] | None:
    """The parameter that all elements of ``tensor`` are in, with the sizes, strides and offset that it has there."""
    storage = tensor.untyped_storage().data_ptr()
    for name, weight in module_tensors(model).items():
        if isinstance(weight, StoredWeight):
            continue
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


def _view(weight: torch.Tensor, view: View) -> torch.Tensor:
    """The elements of ``weight`` in other sizes and strides.

    Raises:
        ValueError: these reach beyond it.
    """
    sizes, strides = view
    fits = len(sizes) == len(strides) and min((*sizes, *strides), default=0) >= 0
    if (
        not fits
        or math.prod(sizes) != weight.numel()
        or _reach(sizes, strides) > _reach(weight.shape, weight.stride())
    ):
        raise ValueError(f"sizes {sizes} and strides {strides} are not a view of a weight of {tuple(weight.shape)}")
    return weight.detach().as_strided(sizes, strides, weight.storage_offset())


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The distance from the first element to the farthest."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def report_data(report: CompileReport) -> Any:
    """A report as plain data; of its seconds, those that compiling took."""
    return to_plain(report)
