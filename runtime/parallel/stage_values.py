"""Values that one stage of a pipeline passes on to the next, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64


@dataclass(frozen=True)
class StageValue:
    """A value that crosses from one stage to the next.

    Attributes:
        name: of the node that computes it.
        dtype: of its elements.
        sizes: of its dims; None for the number of tokens of a step.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int | None, ...]

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Its shape in a step of so many tokens."""
        return tuple(tokens if size is None else size for size in self.sizes)


def pack_values(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of values, one behind the other; the values may change afterwards."""
    parts: list[torch.Tensor] = []
    for value in values:
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        parts += [flat, flat.new_zeros(-len(flat) % _ALIGNMENT)]
    return torch.cat(parts)


def packed_bytes(values: Sequence[StageValue], tokens: int) -> int:
    """The number of bytes of ``pack_values``."""
    sizes = (math.prod(value.shape(tokens)) * value.dtype.itemsize for value in values)
    return sum(size + -size % _ALIGNMENT for size in sizes)


def unpack_values(packed: torch.Tensor, values: Sequence[StageValue], tokens: int) -> list[torch.Tensor]:
    """The values of ``pack_values``, which share its memory."""
    found, start = [], 0
    for value in values:
        shape = value.shape(tokens)
        size = math.prod(shape) * value.dtype.itemsize
        found.append(packed[start : start + size].view(value.dtype).view(shape))
        start += size + -size % _ALIGNMENT
    return found
