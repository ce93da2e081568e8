"""A call of an operator as the limits see it, whether it is in a graph yet or not."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import fx

from ....runtime.npu_target import NpuTarget
from ....runtime.ops.npu import limits
from ...graph.fx_nodes import value


class Call(limits.Call):
    """A call whose arguments may be nodes."""

    @classmethod
    def of(cls, node: fx.Node, target: NpuTarget) -> Self:
        """The call that ``node`` makes."""
        assert isinstance(node.target, torch._ops.OpOverload)
        return cls.make(node.target, target, *node.args, **node.kwargs)

    def value(self, given: Any) -> Any:
        return value(given)
