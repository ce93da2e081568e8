"""Ways to run a model that are compared with each other. Nothing here imports torch.

What is on in one engine and off in the other is one entry of ``COMPARISONS``.
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
        name: of what the second has and the first has not.
        off, on: compile options of both, beside those that were asked for.
        by_default: it is made unless others are named; those that are not compile for minutes.
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
"""In the order in which they are made."""


def chosen(names: Sequence[str]) -> list[Comparison]:
    """The comparisons of these names; without names those that are made by default.

    Raises:
        ValueError: there is none of a name.
    """
    known = {each.name: each for each in COMPARISONS}
    for name in names:
        if name not in known:
            raise ValueError(f"comparison {name!r} is not known; there are {', '.join(known)}")
    return [known[name] for name in names] or [each for each in COMPARISONS if each.by_default]
