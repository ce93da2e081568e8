"""Errors of rows in standard deviations, and the tolerance of comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..passes.graph.fx_nodes import callee

HALF = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6, torch.bfloat16: 0.3, torch.float16: 0.05}
"""By dtype; of half precision until its rounding was measured (``graph_check.measure_rounding``)."""
ROUNDINGS = 5.0
"""By how many times its own rounding a half-precision graph may differ from the original, which rounds likewise."""
_ROUTERS = ("topk", "sort")
_INDEXERS = ("lightning_indexer", "lightning_indexer_seq", "npu_lightning_indexer")


@dataclass(frozen=True)
class Tolerance:
    """The tolerated difference of rows.

    Attributes:
        limit: the largest tolerated error, in standard deviations of a row.
        share: share of rows that must be within the limit.
    """

    limit: float
    share: float = 1.0

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerance:
        """The default tolerance for a dtype, before its rounding is measured."""
        return cls(TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]))

    def error(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """The error to compare with ``limit``, for rows ``[R, n]``."""
        return typical(row_errors(found, expected).tolist(), self.share)


def row_errors(found: torch.Tensor, expected: torch.Tensor, spread: torch.Tensor | None = None) -> torch.Tensor:
    """The largest difference in each row, ``[R]``, in standard deviations; infinite if something is not a number.

    Args:
        found: ``[R, n]``.
        expected: correct values, ``[R, n]``.
        spread: the standard deviation, per row or for all; None: that of each expected row.
    """
    if spread is None:
        spread = torch.maximum(expected.std(dim=-1), 1e-6 * expected.abs().amax(dim=-1)).clamp_min(1e-30)
    return ((found - expected).abs().amax(dim=-1) / spread).nan_to_num(nan=math.inf, posinf=math.inf)


def judged_share(dtype: torch.dtype) -> float:
    """Share of the rows of a model in ``dtype`` that must be right: in half precision, routers flip on ties."""
    return 0.9 if dtype in HALF else 1.0


def typical(errors: Sequence[float], share: float) -> float:
    """The error that ``share`` of the rows stay below, or the worst one if a row is not finite: only routers flip on
    ties."""
    ordered = sorted(errors)
    return ordered[-1] if math.isinf(ordered[-1]) else ordered[int(share * (len(ordered) - 1))]


def routes_tokens(graph: fx.Graph) -> bool:
    """True if a graph has routers: in half precision they may select another of two nearly equal experts, which
    changes the row. In float32 every row must be right."""
    return any(callee(node) in _ROUTERS or "gating_top_k" in callee(node) for node in graph.nodes)


def chooses_keys(graph: fx.Graph) -> bool:
    """True if the attention of a graph reads keys selected by an indexer."""
    return any(callee(node) in _INDEXERS for node in graph.nodes)
