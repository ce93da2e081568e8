"""Weights that are made where a graph reads them: changed, unpacked, merged, or the part of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...passes.graph.cut import Cut
from ...passes.sharding.slices import part_of
from ...runtime.ops.linear.stored_weight import StoredWeight, as_dense
from .float32_run import Deferred
from .self_check import Schedule

_SAMPLE = 1 << 14
_STORED_ROWS = 64


@dataclass(frozen=True)
class Weights:
    """A change of the parameters for a run.

    Attributes:
        name: what they make visible.
        gain: standard deviation of a matrix's output, for input of unit variance.
        vector_scale: factor of biases and the scales of norms.
        vector_noise: standard deviation of what is added to them.
        schedule: sequences that are run with them.
    """

    name: str
    gain: float
    vector_scale: float
    vector_noise: float
    schedule: Schedule


@dataclass(frozen=True)
class ChangedWeight(Deferred):
    """A parameter in float32, changed: ``tensor * factor + noise``.

    Attributes:
        tensor: the parameter.
        factor: of all its entries.
        noise: standard deviation of what is added.
        rounding: relative change of every second column of a matrix.
    """

    tensor: torch.Tensor
    factor: float
    noise: float
    rounding: float = 0.0

    @classmethod
    def of(cls, tensor: torch.Tensor, weights: Weights) -> ChangedWeight:
        """A parameter as ``weights`` says."""
        if tensor.dim() == 1:
            return cls(tensor, weights.vector_scale, weights.vector_noise)
        if isinstance(tensor, StoredWeight):  # of a large one some rows are enough, and are made sooner
            seen = as_dense(tensor.detach()[:: max(1, tensor.shape[0] // _STORED_ROWS)])
        else:
            seen = tensor.detach()
        flat = seen.reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].float()
        spread = float(sample.square().mean().sqrt())
        fan = math.sqrt(tensor.shape[-1] * tensor.shape[-2])
        return cls(tensor, weights.gain / (spread * math.sqrt(fan)) if spread else 1.0, 0.0)

    def make(self) -> torch.Tensor:
        """The changed weight."""
        made = self._scaled(self.tensor)
        if self.noise:
            generator = torch.Generator().manual_seed(made.numel())
            made += self.noise * torch.randn(made.shape, generator=generator)
        return made

    def rows(self, index: slice | torch.Tensor) -> torch.Tensor:
        """The same of ``tensor[index]``."""
        if self.noise:
            return self.make()[index]
        return self._scaled(self.tensor.detach()[index])

    def _scaled(self, part: torch.Tensor) -> torch.Tensor:
        made = _in_float32(part).mul_(self.factor)
        if self.rounding and made.dim() > 1:
            made[..., ::2] *= 1 + self.rounding
        return made

    @property
    def num_rows(self) -> int:
        """The size of its first dim."""
        return self.tensor.shape[0]


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same values; of a stored weight those before it is rounded to its dtype."""
    if isinstance(tensor, StoredWeight):
        return tensor.replaced(dtype=torch.float32).dense()
    return tensor.detach().to(torch.float32, copy=True)


@dataclass(frozen=True)
class Unpacked(Deferred):
    """A weight in its dtype.

    Attributes:
        weight: it.
    """

    weight: torch.Tensor

    def make(self) -> torch.Tensor:
        """The weight as an ordinary tensor."""
        made: torch.Tensor = as_dense(self.weight.detach())
        return made

    def rows(self, index: slice | torch.Tensor) -> torch.Tensor:
        """``make()[index]``; no other rows are made."""
        made: torch.Tensor = as_dense(self.weight.detach()[index])
        return made

    @property
    def num_rows(self) -> int:
        """The size of its first dim."""
        return self.weight.shape[0]


@dataclass(frozen=True)
class Rows(Deferred):
    """Changed weights one after the other.

    Attributes:
        parts: their rows.
    """

    parts: Sequence[Any]

    def make(self) -> torch.Tensor:
        """The tensor that has the rows of all."""
        return torch.cat([part.make() if isinstance(part, Deferred) else part.float() for part in self.parts])

    def rows(self, index: slice | torch.Tensor) -> torch.Tensor:
        """``make()[index]``; of a slice no other rows are made."""
        if not isinstance(index, slice):
            return self.make()[index]
        first, last, step = index.indices(self.num_rows)
        found, begin = [], 0
        for part in self.parts:
            deferred = isinstance(part, Deferred)
            count = part.num_rows if deferred else part.shape[0]
            inside = slice(max(first - begin, 0), max(last - begin, 0))
            if step == 1 and inside.start < min(inside.stop, count):
                found.append(part.rows(inside) if deferred else part[inside].float())
            begin += count
        return torch.cat(found) if step == 1 and found else self.make()[index]

    @property
    def num_rows(self) -> int:
        """The size of its first dim."""
        return sum(part.num_rows if isinstance(part, Deferred) else part.shape[0] for part in self.parts)


@dataclass(frozen=True)
class OfRank(Deferred):
    """The part of a changed weight that a rank holds.

    Attributes:
        of: the weight.
        held: the same part of the unchanged one.
        cut: who holds which part.
        rank: of the one.
    """

    of: ChangedWeight
    held: torch.Tensor
    cut: Cut
    rank: int

    def make(self) -> torch.Tensor:
        """The part of the changed weight."""
        if self.of.noise:  # drawn for all of it
            return part_of(self.of.make(), self.cut, self.rank)
        return replace(self.of, tensor=self.held).make()

    def rows(self, index: slice | torch.Tensor) -> torch.Tensor:
        """``make()[index]``; of a matrix no other rows are made."""
        return self.make()[index] if self.of.noise else replace(self.of, tensor=self.held).rows(index)

    @property
    def num_rows(self) -> int:
        """The size of its first dim."""
        return self.held.shape[0]


@dataclass(frozen=True)
class Part(Deferred):
    """A view of a changed weight.

    Attributes:
        of: the weight.
        view: the same view of the unchanged one.
    """

    of: ChangedWeight
    view: torch.Tensor

    def make(self) -> torch.Tensor:
        """The view of the changed weight."""
        offset = self.view.storage_offset() - self.of.tensor.storage_offset()
        return self.of.make().as_strided(self.view.shape, self.view.stride(), offset)

    @property
    def num_rows(self) -> int:
        """The size of its first dim."""
        return self.view.shape[0]
