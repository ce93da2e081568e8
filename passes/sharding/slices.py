"""The part of a tensor that one rank holds."""

from __future__ import annotations

import math

import numpy as np
import torch

from ...runtime.ops.linear.stored_weight import StoredWeight
from ..graph.cut import ZERO, Cut, Refused


def column_unit(weight: torch.Tensor) -> int:
    """Indices of a weight's inputs that cannot be parted: those of one group of scales, or of one byte."""
    if not isinstance(weight, StoredWeight):
        return 1
    return math.lcm(weight.form.group_size or 1, weight.form.per_byte)


def check_part(tensor: torch.Tensor, cut: Cut) -> None:
    """Raise ``Refused`` if a tensor has no such parts."""
    for each in cut.each():
        if isinstance(tensor, StoredWeight) and _is_along_inputs(tensor, each.dim):
            for held in each.indices:
                _run_of_groups(tensor, held)


def part_of(tensor: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor: a view where its indices are one run, else a copy.

    Raises:
        Refused: a stored weight has no such part.
    """
    for each in cut.each():
        tensor = _part_along(tensor, each.dim, each.indices[rank])
    return tensor


def _part_along(tensor: torch.Tensor, dim: int, held: np.ndarray) -> torch.Tensor:
    if not isinstance(tensor, StoredWeight):
        return _taken(tensor.detach(), dim, held)
    lead = tensor.dim() - 2
    if not _is_along_inputs(tensor, dim):
        return tensor.each(lambda part: _taken(part, min(dim, lead), held))
    first, last, missing = _run_of_groups(tensor, held)
    per_byte, size = tensor.form.per_byte, tensor.form.group_size
    codes = _padded(tensor.codes[..., first // per_byte : last // per_byte], missing // per_byte)
    if not size:
        return tensor.replaced(codes=codes)
    groups = slice(first // size, -(-last // size))
    scales = _padded(tensor.scales[..., groups], missing // size)
    zeros = None if tensor.zeros is None else _padded(tensor.zeros[..., groups], missing // size)
    return tensor.replaced(codes=codes, scales=scales, zeros=zeros)


def _is_along_inputs(tensor: StoredWeight, dim: int) -> bool:
    return dim == tensor.dim() - (2 if tensor.transposed else 1)


def _run_of_groups(tensor: StoredWeight, held: np.ndarray) -> tuple[int, int, int]:
    """First and last input of a part, and how many zeros follow.

    Raises:
        Refused: the part is no run of whole groups.
    """
    if tensor.order is not None:
        raise Refused("its quantized inputs are in another order (act-order)", gathers=True)
    given = held[held != ZERO]
    missing = len(held) - len(given)
    first = int(given[0]) if len(given) else 0
    last = first + len(given)
    if not np.array_equal(given, np.arange(first, last)) or not np.array_equal(held[: len(given)], given):
        raise Refused("quantized inputs are taken in several runs", gathers=True)
    unit, inputs = column_unit(tensor), tensor.codes.shape[-1] * tensor.form.per_byte
    if first % unit or (last % unit and last != inputs) or (missing and (last % unit or missing % unit)):
        raise Refused(
            f"quantized inputs in groups of {unit} are parted at {first} to {last}", unit=unit, gathers=True
        )
    return first, last, missing


def _taken(tensor: torch.Tensor, dim: int, held: np.ndarray) -> torch.Tensor:
    if len(held) and held[0] != ZERO and np.array_equal(held, np.arange(held[0], held[0] + len(held))):
        return tensor.narrow(dim, int(held[0]), len(held))
    taken = tensor.index_select(dim, torch.from_numpy(np.maximum(held, 0)).to(tensor.device))
    zeros = np.flatnonzero(held == ZERO)
    if len(zeros):
        taken.movedim(dim, 0)[torch.from_numpy(zeros).to(tensor.device)] = 0
    return taken


def _padded(part: torch.Tensor, zeros: int) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(*part.shape[:-1], zeros)], -1) if zeros else part
