"""Shares of the stages of a pipeline in a model: the layers, weights and caches that each holds, and what crosses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ...passes import TracedGraph
from ...passes.graph.stages import Piece, deal, pieces_of
from ...runtime.cache.cache_specs import AnySpec, bytes_per_block, bytes_per_slot


@dataclass(frozen=True)
class StageShare:
    """What each rank of one stage holds.

    Attributes:
        first, last: numbers of its layers.
        weight_bytes: of its weights; those that two stages read, such as tied tables, count in both.
        caches: what its layers store.
    """

    first: int
    last: int
    weight_bytes: int
    caches: tuple[AnySpec, ...]

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return bytes_per_block(self.caches, 1)

    @property
    def state_bytes(self) -> int:
        """State of one sequence."""
        return bytes_per_slot(self.caches)


@dataclass(frozen=True)
class StageShares:
    """The stages of a pipeline.

    Attributes:
        stages: each one's share, in order.
        crossing_bytes: of one token, from each stage to the next.
        values: how many tensors that is.
    """

    stages: tuple[StageShare, ...]
    crossing_bytes: int
    values: int

    def to_dict(self) -> dict[str, Any]:
        """Ready for ``json.dump``."""
        stages = [
            {
                "layers": [share.first, share.last],
                "weight_bytes": share.weight_bytes,
                "token_bytes": share.token_bytes,
                "state_bytes": share.state_bytes,
            }
            for share in self.stages
        ]
        return {**asdict(self), "stages": stages}


def stage_shares(traced: TracedGraph, representatives: Sequence[int], stages: int) -> StageShares:
    """Deal the layers of a model, as its compiled program does.

    Args:
        traced: the finished graph of a rank, with the layers that stand for all.
        representatives: for each layer of the whole model, the layer of the graph that is like it.
        stages: number of them.

    Raises:
        UnsupportedModel: it cannot be parted into so many.
    """
    found = pieces_of(traced)
    alike = len(found.pieces) == max(representatives, default=-1) + 1
    pieces = [found.pieces[like] for like in representatives] if alike else list(found.pieces)
    layers = [range(i, i + 1) for i in range(len(pieces))] if alike else [piece.layers for piece in pieces]
    starts = [0, *deal(pieces, stages, found.reason), len(pieces)]
    shares = []
    for first, end in pairwise(starts):
        caches = (traced.caches[index] for piece in pieces[first:end] for index in sorted(piece.caches))
        shares.append(
            StageShare(layers[first][0], layers[end - 1][-1], _bytes(pieces[first:end]), tuple(caches)),
        )
    crossing = max((piece.received for piece in pieces[1:]), key=len, default=())
    size = sum(math.prod(value.shape(1)) * value.dtype.itemsize for value in crossing)
    return StageShares(tuple(shares), size, len(crossing))


def _bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.weight_bytes for piece in pieces)
