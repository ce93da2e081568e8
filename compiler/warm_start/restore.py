"""Linked programs as files hold them: graph, what its inputs receive, how compiling went; and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...passes import TracedGraph
from ...passes.graph.cut import Cut
from ...passes.sharding.slices import part_of
from ...runtime.ops.linear.stored_weight import StoredWeight
from ..link.linkage import Linkage
from ..link.linker import LinkedProgram, merge_linked
from ..link.stages import stage_and_place, stage_of
from ..report import CompileReport
from ..targets.cpu.kernels import kernel_calls
from ..verify.self_check import SHORT_SCHEDULE, Reference
from ..weights.file_pages import will_read
from ..weights.tensor_contents import module_tensors, tensor_digest
from .graph_data import CannotStore, from_data, to_data
from .stored_sources import Assembled

_MOST_BYTES = 64 << 20
"""Tensors that passes made, together: tables and masks, not weights."""


@dataclass(frozen=True)
class StoredReference:
    """The logits of a model, or of its program, as a file holds them.

    Attributes:
        tokens: see ``Reference``, as for the others.
        logits: in the model's dtype.
        tolerance, share: by which the program was judged.
        of_program: see ``Reference``.
    """

    tokens: list[torch.Tensor]
    logits: list[torch.Tensor]
    tolerance: float
    share: float
    of_program: bool = False

    @classmethod
    def of(cls, reference: Reference) -> StoredReference:
        """The part of a reference about the sequences that are run after a load, in the model's own dtype."""
        short = reference.beginning(SHORT_SCHEDULE)
        logits = [rows.to(reference.dtype) for rows in short.logits]
        return cls(list(short.tokens), logits, reference.tolerance, reference.share, reference.of_program)

    def reference(self) -> Reference:
        """The reference that it is of."""
        schedule = replace(SHORT_SCHEDULE, lengths=tuple(map(len, self.tokens)))
        logits = [rows.float() for rows in self.logits]
        dtype = self.logits[0].dtype
        tolerated = self.tolerance, self.share
        return Reference(self.tokens, logits, dtype, schedule, *tolerated, of_program=self.of_program)


View = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


@dataclass(frozen=True)
class StoredProgram:
    """The content of a file about a program.

    Attributes:
        graph: see ``graph_data.to_data``.
        linkage: what its inputs receive.
        weights: input → the module's tensor that it receives, or a view of it.
        tensors: input → what passes made for it.
        digests: of the constants that others were computed from.
        report: how compiling went.
        reference: the model's own logits; None where they were not compared.
    """

    graph: list[tuple[Any, ...]]
    linkage: Linkage
    weights: dict[str, str | tuple[str, View]]
    tensors: dict[str, torch.Tensor]
    digests: dict[str, str]
    report: CompileReport | None = None
    reference: StoredReference | None = None


class Outdated(Exception):
    """A stored program or record is not of the model, or of the checkpoint, as it is now. The message says why."""


def describe(traced: TracedGraph, linkage: Linkage, model: nn.Module) -> StoredProgram:
    """All of a linked program but its report and reference, before its weights are packed.

    Raises:
        CannotStore: a part of it has no plain form.
    """
    names = {id(tensor): name for name, tensor in module_tensors(model).items()}
    weights: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name in linkage.inputs:
        part = traced.notes.parts.get(name)
        tensor = traced.constants.get(name) if part is None else part.whole
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
    wholes = traced.constants | {name: part.whole for name, part in traced.notes.parts.items()}
    digests = {name: tensor_digest(wholes[name]) for name in linkage.folded}
    return StoredProgram(to_data(traced.graph), linkage, weights, tensors, digests)


def restore(
    stored: StoredProgram, named: Mapping[str, torch.Tensor | Assembled], *, merge: bool = True, rank: int = 0
) -> LinkedProgram:
    """The program of ``describe`` over the weights of a module, which may become views of merged ones.

    Args:
        stored: from a file, with a report.
        named: tensors of the module by name, those that it reads at least. What is to be assembled is read as far as
            this rank holds it.
        merge: lay those that are merged out one after the other now; else packing does that for the ones that it
            packs, one at a time.
        rank: of this process among those that run the program together; it takes its parts of the weights.

    Raises:
        Outdated: the module's tensors are not those that the program was made for.
        ValueError: it calls what there is not; nothing of it has been run.
    """
    linkage = stored.linkage
    rank %= linkage.ranks  # within its stage
    constants, own = _constants(stored, named, rank)
    module = from_data(stored.graph)
    for name in linkage.cuts.keys() - own:
        constants[name] = part_of(constants[name], _cut_of(linkage, name, constants[name].shape, rank), rank)
    run = kernel_calls(module)
    later = set() if merge else {source for packed in linkage.packed for source in (packed.name, *packed.sources)}
    will_read(tensor for name, tensor in constants.items() if name not in later)
    merge_linked(linkage, constants, packed=merge)
    assert stored.report is not None
    return LinkedProgram(linkage, constants, run, stored.report)


def constants_of(stored: StoredProgram, named: Mapping[str, torch.Tensor | Assembled]) -> dict[str, torch.Tensor]:
    """The tensors that the inputs of a stored graph receive, whole.

    Args:
        stored: the program.
        named: as for ``restore``.

    Raises:
        Outdated: the module's tensors are not those that the program was made for.
    """
    return _constants(stored, named, None)[0]


def _constants(
    stored: StoredProgram, named: Mapping[str, torch.Tensor | Assembled], rank: int | None
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The tensors of ``constants_of``, and the names of those of which only the part of ``rank`` was assembled."""
    linkage = stored.linkage
    constants: dict[str, torch.Tensor] = dict(stored.tensors)
    wholes: dict[int, torch.Tensor] = {}
    own = set()
    for name, source in stored.weights.items():
        weight, view = (source, None) if isinstance(source, str) else source
        tensor = named.get(weight)
        if tensor is None:
            raise Outdated(f"the model has no tensor {weight!r}")
        if isinstance(tensor, Assembled):
            if rank is not None and view is None and name in linkage.cuts and name not in stored.digests:
                constants[name] = tensor.part(_cut_of(linkage, name, tensor.shape, rank), rank)
                own.add(name)
                continue
            if id(tensor) not in wholes:
                wholes[id(tensor)] = tensor.whole()
            tensor = wholes[id(tensor)]
        constants[name] = tensor if view is None else tensor.detach().as_strided(*view, tensor.storage_offset())
    for name, digest in stored.digests.items():
        if tensor_digest(constants[name]) != digest:
            raise Outdated(f"constants were computed from other values of {stored.weights.get(name, name)!r}")
    return constants, own


def stage_of_rank(stored: StoredProgram, rank: int) -> StoredProgram:
    """What a rank runs of a program that is parted into stages, and reads of its weights.

    Raises:
        ValueError: it is not parted where it says.
    """
    if not stored.linkage.boundaries:
        return stored
    stage, _ = stage_and_place(rank, stored.linkage)
    module, linkage = stage_of(from_data(stored.graph).graph, stored.linkage, stage)
    names = set(linkage.inputs)
    return replace(
        stored,
        graph=to_data(module.graph),
        linkage=linkage,
        weights={name: source for name, source in stored.weights.items() if name in names},
        tensors={name: tensor for name, tensor in stored.tensors.items() if name in names},
        digests={name: digest for name, digest in stored.digests.items() if name in linkage.folded},
    )


def _cut_of(linkage: Linkage, name: str, sizes: Sequence[int], rank: int) -> Cut:
    """The cut of an input, a tensor of these sizes.

    Raises:
        ValueError: it is for other ranks than there are, or for another tensor.
    """
    cut = None
    for dim, runs in reversed(linkage.cuts[name]):
        if len(runs) != linkage.ranks or not 0 <= rank < linkage.ranks:
            raise ValueError(f"{name} is cut for {len(runs)} ranks; this is rank {rank} of {linkage.ranks}")
        cut = Cut(dim, Cut.of_runs(dim, runs, sizes[dim]).indices, cut)
    if cut is None:
        raise ValueError(f"{name} is cut along no dim")
    return cut


def tensors_read(stored: StoredProgram) -> list[str]:
    """Names of the module's tensors that a program reads."""
    return [source if isinstance(source, str) else source[0] for source in stored.weights.values()]


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
