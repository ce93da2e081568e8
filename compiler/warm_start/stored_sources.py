"""Which weights of a quantized checkpoint a parameter is made of, as plain data, and making it of them again.

transformers renames weights, stacks those of experts and lays the gates and ups of one under each other. What it made
is recognized by its contents, as a parameter or expert by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...runtime.ops.linear.stored_weight import StoredWeight
from ..weights.tensor_contents import stored_digest


@dataclass(frozen=True)
class StoredSource:
    """What a parameter is made of.

    Attributes:
        rows: the weights of the checkpoint that are its rows, by name; of stacked matrices those of each.
        stacked: it is a stack of matrices.
        form: its format, as ``str`` spells it.
        dtype: that it is shown in.
        transposed: the last two dims are exchanged.
    """

    rows: tuple[tuple[str, ...], ...]
    stacked: bool
    form: str
    dtype: torch.dtype
    transposed: bool


def stored_source(weight: StoredWeight, name: str, known: Mapping[str, str]) -> StoredSource | None:
    """What a parameter is made of; None where that is not to be found.

    Args:
        weight: the parameter.
        name: its own, which is preferred where several weights are alike.
        known: digest of each of the checkpoint's weights, by name.
    """
    plain = weight.replaced(transposed=False)
    names = {digest: other for other, digest in known.items()}
    rows = (name,) if known.get(name) == stored_digest(weight) else _rows(weight, names)
    if rows is not None:
        return _source(weight, (rows,), stacked=False)
    if weight.dim() != 3:
        return None
    of_each = [_rows(plain.select(0, i), names) for i in range(plain.shape[0])]
    found = tuple(rows for rows in of_each if rows is not None)
    return _source(weight, found, stacked=True) if len(found) == len(of_each) else None


def _source(weight: StoredWeight, rows: tuple[tuple[str, ...], ...], *, stacked: bool) -> StoredSource:
    return StoredSource(rows, stacked, str(weight.form), weight.dtype, weight.transposed)


def _rows(weight: torch.Tensor, names: Mapping[str, str]) -> tuple[str, ...] | None:
    """The names, by digest, of the weights that a matrix is, or that its halves are."""
    assert isinstance(weight, StoredWeight)
    digest = stored_digest(weight)
    if digest in names:
        return (names[digest],)
    if weight.dim() != 2 or weight.codes.shape[0] % 2:
        return None
    halves = [stored_digest(half) for half in weight.replaced(transposed=False).chunk(2)]  # type: ignore[arg-type]
    return tuple(names[half] for half in halves) if names.keys() >= set(halves) else None


def of_source(source: StoredSource, weights: Mapping[str, torch.Tensor]) -> StoredWeight:
    """The parameter, of the weights that a reader found.

    Raises:
        ValueError: a weight is missing, or is not stored as it was.
    """
    matrices = []
    for names in source.rows:
        rows = [weights.get(name) for name in names]
        if not all(isinstance(row, StoredWeight) for row in rows):
            raise ValueError(f"the checkpoint does not hold {', '.join(names)} as quantized weights")
        stored = [row for row in rows if isinstance(row, StoredWeight)]
        first = stored[0]
        if any(row.stored_as != first.stored_as for row in stored):
            raise ValueError(f"{', '.join(names)} are not stored alike")
        matrices.append(first if len(stored) == 1 else _joined(stored))
    whole: torch.Tensor = torch.stack(list(matrices)) if source.stacked else matrices[0]
    assert isinstance(whole, StoredWeight)
    if str(whole.form) != source.form:
        raise ValueError(f"{source.rows[0][0]!r} is stored as {whole.form}, and was as {source.form}")
    return whole.replaced(dtype=source.dtype, transposed=source.transposed)


def _joined(rows: list[StoredWeight]) -> StoredWeight:
    whole = torch.cat([row.replaced(transposed=False) for row in rows])
    assert isinstance(whole, StoredWeight)
    return whole
