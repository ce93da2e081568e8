"""Let sums and products widen their operands themselves, where calls are captured.

Matches:
    add(_to_copy(x, float32), y), mul(_to_copy(x, float32), y)      # x of 16 bits, y of float32 with dims
Becomes:
    add(x, y), mul(x, y)
Why it is faster:
    one launch less. ``aclnnAdd`` and ``aclnnMul`` give their kernels a float32 and a 16-bit operand as they are
    (ops-math, ``aclnn_add.cpp``: ``isAddMixDtypeSupport``, for alpha 1, and ``aclnn_mul.cpp``:
    ``IsMulMixDtypeSupport``); the graph engine would cast.

Level 1: the numbers are the same bits.
"""

from __future__ import annotations

import torch
from torch import fx

from ....runtime.npu_target import Product
from ...graph.fx_nodes import callee, is_tensor, value
from ...graph.record import PassRecord
from ...graph.rewrite_each import rewrite_each
from ...graph.traced import TracedGraph

_MIXING = frozenset({"add.Tensor", "mul.Tensor"})
_HALF = (torch.float16, torch.bfloat16)


def mix_dtypes(traced: TracedGraph) -> PassRecord:
    """Take out casts to float32 that only such sums and products read."""
    target = traced.npu
    captures = target is not None and target.graph_mode == "aclgraph" and target.product is not Product.INFERENCE

    def step(node: fx.Node) -> str | None:
        if callee(node) != "_to_copy" or node.kwargs != {"dtype": torch.float32}:
            return None
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if value(source).dtype not in _HALF or not node.users or not all(_widens(user, node) for user in node.users):
            return None
        node.replace_all_uses_with(source)
        return ""

    return rewrite_each(traced, "mix_dtypes", step, None if captures else ())


def _widens(user: fx.Node, operand: fx.Node) -> bool:
    """Tell whether ``user`` yields float32 whatever the dtype of ``operand`` is."""
    if callee(user) not in _MIXING or user.kwargs:
        return False
    others = [node for node in user.args if node is not operand]
    return len(others) == 1 and is_tensor(others[0]) and _is_wide(value(others[0]))


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.dim() > 0  # one without dims does not decide the dtype
