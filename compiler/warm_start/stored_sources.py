"""Which tensors of a checkpoint a parameter is made of, as plain data, and making it, or a part, of them again.

transformers renames weights, stacks those of experts and lays the gates and ups of one under each other. What it made
is recognized by its contents, as a parameter or expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...passes.graph.cut import ZERO, Cut
from ...passes.sharding.slices import part_of
from ...runtime.ops.linear.stored_weight import StoredWeight
from ..weights.file_pages import will_read
from ..weights.tensor_contents import stored_digest
from .checkpoint_files import sample_digest


@dataclass(frozen=True)
class StoredSource:
    """What a parameter is made of.

    Attributes:
        rows: the tensors of the checkpoint that are its rows, by name; of a stack those of each entry.
        stacked: it is a stack.
        form: its format, as ``str`` spells it; "" for floats.
        dtype: that it is shown in, or of floats the one that they are converted to.
        transposed: the last two dims are exchanged.
    """

    rows: tuple[tuple[str, ...], ...]
    stacked: bool
    form: str
    dtype: torch.dtype
    transposed: bool


def stored_source(weight: StoredWeight, name: str, known: Mapping[str, str]) -> StoredSource | None:
    """What a quantized parameter is made of; None where that is not to be found.

    Args:
        weight: the parameter.
        name: its own, which is preferred where several weights are alike.
        known: digest of each of the checkpoint's weights, by name.
    """
    names = {digest: other for other, digest in known.items()}
    rows = (name,) if known.get(name) == stored_digest(weight) else _rows(weight, names)
    if rows is not None:
        return StoredSource((rows,), False, str(weight.form), weight.dtype, weight.transposed)
    found = _stack(weight.replaced(transposed=False), names) if weight.dim() == 3 else None
    return None if found is None else StoredSource(found, True, str(weight.form), weight.dtype, weight.transposed)


def float_source(tensor: torch.Tensor, names: Mapping[str, str]) -> StoredSource | None:
    """What a parameter of floats is a stack of; None where that is not to be found.

    Args:
        tensor: the parameter.
        names: of the checkpoint's tensors, by their digests, in their own dtypes and in this one.
    """
    found = _stack(tensor, names) if tensor.dim() > 1 and tensor.is_contiguous() else None
    return None if found is None else StoredSource(found, True, "", tensor.dtype, False)


def _stack(tensor: torch.Tensor, names: Mapping[str, str]) -> tuple[tuple[str, ...], ...] | None:
    found = []
    for entry in range(tensor.shape[0]):
        rows = _rows(tensor.detach().select(0, entry), names)
        if rows is None:
            return None
        found.append(rows)
    return tuple(found)


def _rows(tensor: torch.Tensor, names: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names, by digest, of the tensors that a matrix or a vector is, or that its halves are."""
    digest = _digest(tensor)
    if digest in names:
        return (names[digest],)
    plain = tensor.replaced(transposed=False) if isinstance(tensor, StoredWeight) else tensor
    if plain.dim() != 2 or plain.shape[0] % 2:
        return None
    halves = [_digest(half) for half in plain.chunk(2)]
    return tuple(names[half] for half in halves) if names.keys() >= set(halves) else None


def _digest(tensor: torch.Tensor) -> str:
    return stored_digest(tensor) if isinstance(tensor, StoredWeight) else sample_digest(tensor)


class Assembled:
    """A parameter that is made of tensors of files when it is asked for, all of it or what one rank holds.

    Args:
        source: what it is made of.
        tensors: those of the checkpoint, by name, mapped and not read.

    Attributes:
        shape: its sizes.

    Raises:
        ValueError: a tensor is missing, or is not stored as it was.
    """

    def __init__(self, source: StoredSource, tensors: Mapping[str, torch.Tensor]) -> None:
        self._source = source
        self._entries = [_checked(source, names, tensors) for names in source.rows]
        first, *others = self._entries[0]
        sizes = [sum(len(row) for row in (first, *others)), *first.shape[1:]]
        if source.transposed:
            sizes[-2:] = reversed(sizes[-2:])
        self.shape = torch.Size([len(self._entries), *sizes] if source.stacked else sizes)

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self._joined(self._entries)

    def form(self) -> torch.Tensor:
        """The same on the meta device: nothing of it is read."""
        return self._joined([[_each(_without_data, row) for row in entry] for entry in self._entries])

    def part(self, cut: Cut, rank: int) -> torch.Tensor:
        """What a rank holds of it; of the files no more is read.

        Raises:
            Refused: a quantized weight has no such part.
        """
        outer, held = self._source.stacked, list(range(len(self._entries)))
        lead = self._entries[0][0].dim() - 2
        inner = []
        for each in cut.each():
            if outer and each.dim == 0:
                held = each.indices[rank].tolist()
            else:
                dim = each.dim - outer
                turned = self._source.transposed and dim >= lead
                inner.append((2 * lead + 1 - dim if turned else dim, each.indices[rank]))
        entries = []
        for entry in held:
            rows = self._entries[max(entry, 0)]
            for dim, indices in inner:
                rows = _rows_of(rows, indices) if dim == 0 else [_part(row, dim, indices) for row in rows]
            entries.append(rows if entry != ZERO else [_each(torch.zeros_like, row) for row in rows])
        return self._joined(entries)

    def _joined(self, entries: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        rows = [row for entry in entries for row in entry]
        will_read(rows)
        found = rows[0] if len(rows) == 1 else torch.cat(rows)
        if self._source.stacked:
            found = _each(lambda part: part.unflatten(0, (len(entries), -1)), found)
        if isinstance(found, StoredWeight):
            return found.replaced(dtype=self._source.dtype, transposed=self._source.transposed)
        found = found.to(self._source.dtype)
        return found.mT if self._source.transposed else found


def _checked(source: StoredSource, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The rows of a matrix, as they are stored.

    Raises:
        ValueError: one is missing, or is not stored as it was.
    """
    found = []
    for name in names:
        tensor = tensors.get(name)
        form = str(tensor.form) if isinstance(tensor, StoredWeight) else ""
        if tensor is None or form != source.form:
            raise ValueError(f"the checkpoint does not hold {name!r} as {source.form or 'floats'}")
        found.append(tensor.replaced(transposed=False) if isinstance(tensor, StoredWeight) else tensor)
    if any(_stored_as(row) != _stored_as(found[0]) for row in found):
        raise ValueError(f"{', '.join(names)} are not stored alike")
    return found


def _stored_as(row: torch.Tensor) -> object:
    return row.stored_as if isinstance(row, StoredWeight) else (row.dtype, row.shape[1:])


def _rows_of(rows: Sequence[torch.Tensor], indices: np.ndarray) -> list[torch.Tensor]:
    """Tensors that together are these rows of others that lie under each other."""
    found, first = [], 0
    owner = np.searchsorted(np.cumsum([len(row) for row in rows]), indices, side="right")
    firsts = np.cumsum([0, *(len(row) for row in rows)])
    ends = [*(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(indices)]
    for end in ends:
        at = int(owner[first])
        held = indices[first:end]
        found.append(_part(rows[at], 0, np.where(held == ZERO, ZERO, held - firsts[at])))
        first = end
    return found


def _part(tensor: torch.Tensor, dim: int, indices: np.ndarray) -> torch.Tensor:
    return part_of(tensor, Cut(dim, (indices,)), 0)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _each(change: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return tensor.each(change) if isinstance(tensor, StoredWeight) else change(tensor)
