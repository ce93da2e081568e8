"""Weights as kernels read them, made of the matrices that are their rows, or of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...passes.graph.notes import PackedWeight
from ...runtime.ops.linear.packed_linear import pack_weight
from ...runtime.ops.linear.quantized_weight import PANEL, pack_matrices, packed_bytes
from ...runtime.ops.linear.stored_weight import StoredWeight, as_dense
from .rounded_weights import check_rounded_weight


def packed_apart(rows: Sequence[torch.Tensor], noted: PackedWeight) -> bool:
    """Whether the rows of a weight can be packed without being merged."""
    if rows[0].dim() != 2:
        return False
    return noted.quantization is None or not any(len(part) % PANEL for part in rows[:-1])


def pack_rows(rows: Sequence[torch.Tensor], noted: PackedWeight) -> torch.Tensor:
    """Pack a weight.

    Args:
        rows: ``[out, in]`` matrices for which ``packed_apart`` is true, or the whole weight, of experts
            ``[E, out, in]``.
        noted: how.

    Returns:
        what ``packed_linear`` or ``quantized_linear`` reads; of experts one beside the other, ``[E, ...]``.
    """
    scheme = noted.quantization
    if rows[0].dim() == 3:
        experts = matrices(rows[0], noted)
        if scheme is None:
            return torch.stack([pack_rows([expert], noted) for expert in experts])
        return pack_matrices(experts, scheme).view(len(experts), -1)
    if scheme is None:
        return pack_weight(*map(as_dense, rows))
    return pack_matrices(rows, scheme)


def check_rows(rows: Sequence[torch.Tensor], packed: torch.Tensor, noted: PackedWeight) -> None:
    """Compare what ``pack_rows`` made of quantized weights by ``check_rounded_weight``, which may raise; of experts
    the first and the last."""
    scheme = noted.quantization
    assert scheme is not None
    if rows[0].dim() == 3:
        experts = matrices(rows[0], noted)
        for expert in {0, len(experts) - 1}:
            check_rounded_weight(f"{noted.name}[{expert}]", experts[expert], packed[expert], scheme)
        return
    parts = packed.split([packed_bytes(len(part), part.shape[1], scheme) for part in rows])
    for part, laid in zip(rows, parts, strict=True):
        check_rounded_weight(noted.name, part, laid, scheme)


def matrices(weight: torch.Tensor, noted: PackedWeight) -> list[torch.Tensor]:
    """Of experts, each one's ``[out, in]``."""
    stack = weight.detach().unbind(0)
    turned = weight.transposed if isinstance(weight, StoredWeight) else noted.transposed
    return [matrix.transpose(0, 1) if turned else matrix for matrix in stack]
