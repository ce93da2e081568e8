"""Limits of npu_rotary_mul, npu_interleave_rope and npu_apply_rotary_pos_emb (op-plugin docs)."""

from __future__ import annotations

import math

import torch

from .call import Call
from .rules import (
    A2,
    A3,
    A5,
    FLOAT,
    HALF,
    INFERENCE,
    Limits,
    below,
    dense,
    given,
    in_reference,
    lowered,
    shaped,
    sizes,
)

_MAX_ROTARY_DIM, _INTERLEAVED_DIM = 896, 64
"""Dims of a head are below the one in npu_rotary_mul, and the other in npu_interleave_rope."""
_APPLIED_DIMS = (64, 128)
"""Dims of a head in npu_apply_rotary_pos_emb."""
_UNIFIED_BUFFER = 192 * 1024
"""Bytes on a core that heads of queries and keys of one token have to fit in there."""


def _product_of(*sizes: int | None) -> int | None:
    """None where one of them varies."""
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _rotary_layout(call: Call) -> str:
    """x [B, S, N, D] with cos and sin [B or 1, S, 1, D]."""
    x, cos, sin = call.shape("input"), call.shape("r1"), call.shape("r2")
    if cos != sin or len(cos) != 4 or cos[2] != 1:
        return f"r1 is {cos} and r2 {sin}; both must be [B or 1, S, 1, D]"
    batch, tokens, heads, _ = x
    if cos[0] not in (1, batch):
        return f"r1 has batch {cos[0]}, the input {batch}"
    if None not in (cos[1], tokens) and cos[1] != tokens:
        return f"r1 has {cos[1]} tokens, the input {tokens}"
    if heads is None or heads >= 1000 or (batch is not None and batch >= 1000):
        return f"batch {batch} and heads {heads} must be below 1000"
    if call["rotary_mode"] == "interleave" and call.target.product is not A5:
        # The document does not say that ``rotate`` lifts either.
        if cos[0] != 1:
            return f"r1 has batch {cos[0]}; with rotary_mode 'interleave' one table serves the whole batch"
        if (rows := _product_of(batch, heads)) is not None and rows >= 1000:
            return f"batch {batch} times heads {heads} must be below 1000 with rotary_mode 'interleave'"
    return ""


def _even_heads(call: Call) -> str:
    x, cos = call.shape("input"), call.shape("r1")
    if len(cos) == len(x) and (cos[-1] != x[-1] or x[-1] is None or x[-1] % 2):
        return f"r1 has {cos[-1]} entries, a head {x[-1]} dims; they must agree and be even"
    return ""


def _rotary_inference_chip(call: Call) -> str:
    if call.target.product is not INFERENCE:
        return ""
    x, cos = call.shape("input"), call.shape("r1")
    if x[3] != 128:
        return f"heads of {x[3]} dims; 128 on this chip"
    if call["rotary_mode"] != "half" or call["rotate"] is not None:
        return "rotary_mode must be 'half' and rotate left out on this chip"
    spread = _product_of(x[2], x[0] if cos[0] == 1 else 1)
    return f"r1 is spread over {spread} heads; at most 1024 on this chip" if spread and spread > 1024 else ""


def _rotary_mode(call: Call) -> str:
    mode, rotate, product = call["rotary_mode"], call["rotate"], call.target.product
    if mode not in ("half", "interleave"):
        return f"rotary_mode is {mode!r}; it must be 'half' or 'interleave'"
    if rotate is None:
        # Without the matrix torchair emits RotaryMul on these chips, which has no mode and rotates halves.
        lost = mode == "interleave" and product is not A5
        return "without rotate the graph engine ignores rotary_mode='interleave' on this chip" if lost else ""
    if product is A5:
        return "rotate is not for this chip, which knows the mode itself"
    dim = call.shape("input")[-1]
    return "" if call.shape("rotate") == (dim, dim) else f"rotate is {call.shape('rotate')}; it must be {(dim, dim)}"


def _written_inputs(call: Call) -> str:
    """Refuse npu_apply_rotary_pos_emb where graphs are captured: it writes into its inputs, which its schema does not
    say, so that what npugraph_ex makes of its graph may read them afterwards."""
    return "" if call.target.graph_mode == "ge" else "it writes into its inputs without saying so"


def _unified_buffer(call: Call) -> str:
    """Bytes for the heads of a token (CANN's ``aclnnApplyRotaryPosEmbV2.md``, section on constraints)."""
    heads, wide = (call.shape("query")[2] or 0) + (call.shape("key")[2] or 0), call.dtype("query") is torch.bfloat16
    size = 2 if call.dtype("query") is torch.float16 else 4
    needed = heads * 128 * size * 5 + 128 * (2 if wide else size) * 4 + wide * 128 * 4 * 2
    return "" if needed <= _UNIFIED_BUFFER else f"{heads} heads of a token take {needed} bytes of {_UNIFIED_BUFFER}"


LIMITS = {
    "npu_rotary_mul": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"input": FLOAT},
        # The eager kernel casts cos and sin to the dtype of the input, the graph engine does not.
        alike=[("input", "r1", "r2", "rotate")],
        ranks={"input": (3, 4)},
        forms={"input": (4,)},
        rules=[
            lowered(_rotary_layout),
            _even_heads,
            lowered(_rotary_inference_chip),
            lowered(_rotary_mode),
            below("input", -1, _MAX_ROTARY_DIM),
            in_reference(shaped("input [*B, D], r1 [*B?, D], r2 [*B?, D], rotate [D, D]")),
        ],
    ),
    "npu_interleave_rope": Limits(
        frozenset({A2, A3}),
        {"x": HALF},
        alike=[("x", "cos", "sin")],
        ranks={"x": (4,), "cos": (4,), "sin": (4,)},
        rules=[
            shaped("x [B, N, S, D], cos [B?, N?, S?, D], sin [B?, N?, S?, D]"),
            sizes("x", -1, (_INTERLEAVED_DIM,)),
            sizes("cos", 1, (1,)),
            in_reference(sizes("sin", 1, (1,))),
            dense("x", "cos", "sin"),
        ],
    ),
    # Below 950, of which only the documents of one kind say that it runs this.
    "npu_apply_rotary_pos_emb": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"query": FLOAT},
        alike=[("query", "key", "cos", "sin")],
        ranks={"query": (4,), "key": (4,), "cos": (4,), "sin": (4,)},
        rules=[
            lowered(_written_inputs),
            given("layout", "BSND"),
            given("rotary_mode", "half"),
            shaped("query [B, S, N, D], key [B, S, M, D], cos [B, S, 1, D], sin [B, S, 1, D]"),
            sizes("query", -1, _APPLIED_DIMS),
            lowered(_unified_buffer),
        ],
    ),
}
