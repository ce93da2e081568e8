"""Pairs of ways to run a model, to compare. Nothing here imports torch.

One entry of ``COMPARISONS`` is a feature that is on in one engine and off in the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COMPARISONS", "Comparison", "chosen"]


@dataclass(frozen=True)
class Comparison:
    """Two ways to run the model.

    Attributes:
        name: the feature.
        off, on: compile options of both, in addition to the requested ones.
        by_default: run it unless others are named; the rest compile for minutes.
    """

    name: str
    off: Mapping[str, Any]
    on: Mapping[str, Any]
    by_default: bool = True


_ACLGRAPH = {"codegen": "aclgraph"}
_STATIC = {"codegen": "ge", "static_decode": True}
_STATIC_KERNELS = {"static_kernel_compile": True}
COMPARISONS = (
    Comparison("graph engine", {"codegen": "none"}, {"codegen": "ge"}),
    Comparison("captured graphs", {"codegen": "none"}, _ACLGRAPH),
    Comparison("static decode graphs", {"codegen": "ge"}, _STATIC),
    Comparison("streams", _ACLGRAPH, {**_ACLGRAPH, "schedule": {"streams": True}}),
    Comparison("prefetch", _ACLGRAPH, {**_ACLGRAPH, "schedule": {"prefetch": True}}),
    Comparison(
        "super kernels of the graph engine",
        _STATIC,
        {**_STATIC, "schedule": {"super_kernels": True}},
        by_default=False,
    ),
    Comparison("FRACTAL_NZ", _ACLGRAPH, {**_ACLGRAPH, "pack_weights": True}),
    Comparison("blocks of 256 tokens", _ACLGRAPH, {**_ACLGRAPH, "block_size": 256}),
    Comparison("blocks of 512 tokens", _ACLGRAPH, {**_ACLGRAPH, "block_size": 512}),
    Comparison("static kernels", _ACLGRAPH, {**_ACLGRAPH, "npu_options": _STATIC_KERNELS}, by_default=False),
    Comparison(
        "super kernels",
        {**_ACLGRAPH, "npu_options": _STATIC_KERNELS},
        {**_ACLGRAPH, "npu_options": {**_STATIC_KERNELS, "super_kernel_optimize": True}},
        by_default=False,
    ),
)
"""All comparisons, in the order of the run."""


def chosen(names: Sequence[str]) -> list[Comparison]:
    """The comparisons with these names; without names, the default ones.

    Raises:
        ValueError: a name is unknown.
    """
    known = {each.name: each for each in COMPARISONS}
    for name in names:
        if name not in known:
            raise ValueError(f"comparison {name!r} is unknown; use one of {', '.join(known)}")
    return [known[name] for name in names] or [each for each in COMPARISONS if each.by_default]
