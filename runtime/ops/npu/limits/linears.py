"""Limits of matrix products: op-plugin docs npu_linear and npu_transpose_batchmatmul."""

from __future__ import annotations

from .call import Call
from .rules import A2, A3, FLOAT, INFERENCE, Limits, lowered, shaped

_PRODUCT_MULTIPLE, _MAX_PRODUCT_DIM = 16, 65535
"""Sizes of npu_transpose_batchmatmul."""
_ROWS_FIRST, _AS_STORED = [1, 0, 2], [0, 1, 2]


def _transposes(call: Call) -> str:
    order = list(call["perm_x1"] or _AS_STORED)
    if order not in (_AS_STORED, _ROWS_FIRST):
        return f"perm_x1 is {order}; it must be [0, 1, 2] or [1, 0, 2]"
    if list(call["perm_x2"] or _AS_STORED) != _AS_STORED or list(call["perm_y"] or _ROWS_FIRST) != _ROWS_FIRST:
        return "perm_x2 must be [0, 1, 2] and perm_y [1, 0, 2]"
    return ""


def _batched_product(call: Call) -> str:
    x, weight = call.shape("input"), call.shape("weight")
    order = list(call["perm_x1"] or _AS_STORED)
    if order not in (_AS_STORED, _ROWS_FIRST):
        return ""
    batch, features = x[order[0]], x[2]
    if batch is None or features is None or (batch, features) != weight[:2]:
        return f"input is {x}, turned by {order}, and weight {weight}"
    columns = weight[2]
    if features % _PRODUCT_MULTIPLE or columns is None or columns % _PRODUCT_MULTIPLE:
        return f"weight is {weight}; its last two dims must be multiples of {_PRODUCT_MULTIPLE}"
    if max(columns, batch, features) > _MAX_PRODUCT_DIM:
        return f"weight is {weight}; each dim at most {_MAX_PRODUCT_DIM}"
    if order == _ROWS_FIRST and batch * features > _MAX_PRODUCT_DIM:
        return f"a row of the input has {batch} * {features} entries; at most {_MAX_PRODUCT_DIM} where it is turned"
    parts = call["batch_split_factor"] or 1
    return f"batch_split_factor={parts} does not divide {batch} * {columns}" if batch * columns % parts else ""


def _one_plain_result(call: Call) -> str:
    plain = call["bias"] is None and call["scale"] is None and call["batch_split_factor"] == 1
    return "" if plain else "bias and scale must be left out, batch_split_factor must be 1"


LIMITS = {
    # The document lists float32, float16, int32 and int8 alone. It is older than the kernel, which is aclnnMatmul
    # (GE: MatMul) with a transposed weight: those take bfloat16, and plain linear layers of bf16 models run on them.
    "npu_linear": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"input": FLOAT},
        alike=[("input", "weight", "bias")],
        ranks={"input": (2,), "weight": (2,)},
        rules=[shaped("input [M, K], weight [N, K], bias [N]")],
    ),
    "npu_transpose_batchmatmul": Limits(
        frozenset({A2, A3}),
        {"input": FLOAT},
        alike=[("input", "weight")],
        ranks={"input": (3,), "weight": (3,)},
        rules=[lowered(_one_plain_result), _transposes, _batched_product],
    ),
}
