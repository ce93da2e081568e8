"""Functions of experts between their two products, identified by running them; random numbers to run regions on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from ...runtime.ops.moe.moe import activate
from ..graph.evaluate import at_sizes
from ..graph.fx_nodes import shape, value
from ..graph.region import Region

if TYPE_CHECKING:
    import sympy

_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "quick_gelu")
_FEW_ROWS = 32
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@dataclass(frozen=True)
class ExpertFormula:
    """The function from an expert's first product to the input of its second (see ``pagoda::moe``)."""

    activation: str
    layout: str
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return activate(hidden, self.activation, self.alpha, self.limit, self.layout)


def find_formula(hidden: torch.Tensor, found: torch.Tensor, constants: list[float]) -> ExpertFormula | None:
    """Find the known function that makes ``found`` of ``hidden``; None if there is none.

    Args:
        hidden: random results of the first product.
        found: what the graph makes of them.
        constants: that the graph uses on the way; those above 0 are the only candidates for limits and factors.
    """
    constants = [x for x in constants if x > 0]
    layouts = ("halves", "interleaved")
    if hidden.shape[-1] == 2 * found.shape[-1]:
        candidates = [
            ExpertFormula(kind, layout, 0.0, limit)
            for limit, layout, kind in itertools.product((0.0, *constants), layouts, _KINDS)
        ]
        candidates += [
            ExpertFormula("clipped_swiglu", layout, alpha, limit)
            for layout, alpha, limit in itertools.product(layouts, constants, constants)
        ]
    else:
        candidates = [ExpertFormula(kind, "plain") for kind in _KINDS]
    # The closest, not the first that is close: in half precision the two GELUs are within the tolerance.
    few, few_found = hidden.flatten(0, -2)[:_FEW_ROWS], found.flatten(0, -2)[:_FEW_ROWS]
    best = min(candidates, key=lambda formula: difference(few_found, formula(few)))
    return best if close(found, best(hidden)) else None


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to 1 plus the magnitude; infinite for another shape or dtype."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    error = (found.double() - expected.double()).abs() / (1 + expected.double().abs())
    return float(error.nan_to_num(nan=float("inf")).max())


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether the two are equal but for rounding."""
    return difference(found, expected) <= _TOLERANCE.get(found.dtype, 0.0)


class RandomNumbers:
    """Random values for the inputs of parts of a graph, at sizes that are small and differ.

    Args:
        regions: the parts.

    Attributes:
        sizes: symbol → number.
    """

    def __init__(self, *regions: Region) -> None:
        symbols = sorted({s for region in regions for s in region.symbols}, key=str)
        self.sizes: dict[sympy.Symbol, int] = {s: 3 + 2 * i for i, s in enumerate(symbols)}
        self._generator = torch.Generator().manual_seed(0)

    def like(self, node: fx.Node) -> torch.Tensor:
        """Standard normal numbers of the shape and dtype of ``node``."""
        return self.normal(at_sizes(shape(node), self.sizes), value(node).dtype)

    def normal(self, sizes: tuple[int, ...], dtype: torch.dtype, largest: float = 1.0) -> torch.Tensor:
        """Normal numbers; half of them have standard deviation 1, half ``largest``."""
        numbers = torch.randn(sizes, generator=self._generator)
        large = torch.rand(sizes, generator=self._generator) < 0.5
        return torch.where(large, largest * numbers, numbers).to(dtype)

    def chosen(self, tokens: int, experts: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``[tokens, count]`` experts, none twice for a token."""
        return torch.rand(tokens, experts, generator=self._generator).topk(count, dim=1).indices.to(dtype)
