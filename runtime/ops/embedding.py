"""`pagoda::embedding_of_rank`: rows of a table that ranks hold together."""

from __future__ import annotations

import torch

from .registration import Facts, register_operator

aten = torch.ops.aten


def embedding_of_rank_reference(weight: torch.Tensor, ids: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """The rows of ``ids`` that this rank holds, zeros for the others.

    Args:
        weight: ``[rows, D]``, those from ``first`` on.
        ids: ``[...]`` int64, counted over all ranks.
        first: ``[1]`` int64.

    Returns:
        ``[..., D]`` in the dtype of ``weight``, contiguous. Summed over the ranks: ``embedding`` of the whole table.
    """
    local = ids - first
    held = (local >= 0) & (local < weight.shape[0])
    rows = aten.embedding(weight, aten.where(held, local, 0))
    return rows.masked_fill(~held[..., None], 0)


def _rows(weight: torch.Tensor, ids: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


embedding_of_rank = register_operator(
    "embedding_of_rank(Tensor weight, Tensor ids, Tensor first) -> Tensor",
    Facts(over="elements", invariant=True, kind="", spelled_out=True),
    fake=_rows,
    reference=embedding_of_rank_reference,
    cpu=embedding_of_rank_reference,
)
