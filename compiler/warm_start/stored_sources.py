"""Which tensors of a checkpoint a parameter is made of, as plain data, and making it, or a part, of them again.

transformers renames weights, stacks those of experts and lays the gates and ups of one under each other. What it made
is recognized by its contents, as a parameter or expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ...passes.graph.cut import ZERO, Cut
from ...passes.sharding.slices import part_of
from ...runtime.ops.linear.stored_weight import StoredWeight
from ..weights.file_pages import will_read
from ..weights.tensor_contents import stored_digest
from .checkpoint_files import Find, Unread, sample_digest


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
        find: finds the checkpoint's tensors, mapped and not read.

    Raises:
        ValueError: a tensor is missing, or is not stored as it was; where it is read.
    """

    def __init__(self, source: StoredSource, find: Find) -> None:
        self._source = source
        self._entries = [[_Row(name, source.form, find) for name in names] for names in source.rows]

    @cached_property
    def shape(self) -> torch.Size:
        """Its sizes."""
        rows, *inner = self._row_shape
        sizes = [rows * len(self._entries[0]), *inner]
        if self._source.transposed:
            sizes[-2:] = reversed(sizes[-2:])
        return torch.Size([len(self._entries), *sizes] if self._source.stacked else sizes)

    @cached_property
    def _row_shape(self) -> torch.Size:
        return self._entries[0][0].shape

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self._joined([[row.part([]) for row in entry] for entry in self._entries])

    def form(self) -> torch.Tensor:
        """The same on the meta device: nothing of it is kept in memory."""
        return self._joined([[_each(_without_data, row.part([])) for row in entry] for entry in self._entries])

    def part(self, cut: Cut, rank: int) -> torch.Tensor:
        """What a rank holds of it; of the files no more is kept in memory.

        Raises:
            Refused: a quantized weight has no such part.
        """
        outer, held = self._source.stacked, list(range(len(self._entries)))
        lead = len(self._row_shape) - 2
        rows, others = None, []
        for each in cut.each():
            indices = each.indices[rank]
            if outer and each.dim == 0:
                held = indices.tolist()
                continue
            dim = each.dim - outer
            dim = 2 * lead + 1 - dim if self._source.transposed and dim >= lead else dim
            if dim == 0 and len(self._entries[0]) > 1:
                rows = indices
            else:
                others.append(Cut(dim, (indices,)))
        entries = []
        for entry in held:
            found = list(_parts(self._entries[max(entry, 0)], rows, others, self._row_shape[0]))
            entries.append(found if entry != ZERO else [_each(torch.zeros_like, part) for part in found])
        return self._joined(entries)

    def _joined(self, entries: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        rows = [row for entry in entries for row in entry]
        if any(_stored_as(row) != _stored_as(rows[0]) for row in rows):
            raise ValueError(
                f"{self._source.rows[0][0]!r} and {len(rows) - 1} that it is read with are not stored alike"
            )
        will_read(rows)
        found = rows[0] if len(rows) == 1 else torch.cat(rows)
        if self._source.stacked:
            found = _each(lambda part: part.unflatten(0, (len(entries), -1)), found)
        if isinstance(found, StoredWeight):
            return found.replaced(dtype=self._source.dtype, transposed=self._source.transposed)
        found = found.to(self._source.dtype)
        return found.mT if self._source.transposed else found


class _Row:
    """One of the checkpoint's tensors of which a parameter is made, read when it is asked for."""

    def __init__(self, name: str, form: str, find: Find) -> None:
        self._name, self._form, self._find = name, form, find

    @property
    def shape(self) -> torch.Size:
        found = self._found()
        return self._plain(found).shape if isinstance(found, torch.Tensor) else found.shape

    def part(self, cuts: Sequence[Cut]) -> torch.Tensor:
        """What cuts for one rank leave of it; all of it without cuts.

        Raises:
            ValueError: it is missing, or is not stored as it was.
        """
        found = self._found()
        if not isinstance(found, torch.Tensor):
            return self._plain(found.part(cuts) if cuts else found.whole())
        found = self._plain(found)
        for cut in cuts:
            found = part_of(found, cut, 0)
        return found

    def _found(self) -> torch.Tensor | Unread:
        found = self._find(self._name)
        if found is None:
            raise self._otherwise()
        return found

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if (str(tensor.form) if isinstance(tensor, StoredWeight) else "") != self._form:
            raise self._otherwise()
        return tensor.replaced(transposed=False) if isinstance(tensor, StoredWeight) else tensor

    def _otherwise(self) -> ValueError:
        return ValueError(f"the checkpoint does not hold {self._name!r} as {self._form or 'floats'}")


def _parts(
    rows: Sequence[_Row], held: np.ndarray | None, others: Sequence[Cut], height: int
) -> Iterator[torch.Tensor]:
    """What is held of a matrix: the parts of the tensors that lie under each other in it, each of so many rows."""
    if held is None:
        yield from (row.part(others) for row in rows)
        return
    known = np.maximum.accumulate(np.where(held == ZERO, 0, np.arange(len(held))))
    owner = np.maximum(held[known], 0) // height  # zeros are of the tensor before them
    first = 0
    for end in (*(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(held)):
        at, run = int(owner[first]), held[first:end]
        yield rows[at].part([Cut(0, (np.where(run == ZERO, ZERO, run - at * height),)), *others])
        first = end


def _stored_as(row: torch.Tensor) -> object:
    return row.stored_as if isinstance(row, StoredWeight) else (row.dtype, row.shape[1:])


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _each(change: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return tensor.each(change) if isinstance(tensor, StoredWeight) else change(tensor)
