"""Limits of npu_rotary_mul (op-plugin docs)."""

from __future__ import annotations

import math

from ...graph.npu_target import Product
from .call import Call


def _product_of(*sizes: int | None) -> int | None:
    """None where one of them varies."""
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _rotary_layout(call: Call) -> str:
    """x [B, S, N, D] with cos and sin [B or 1, S, 1, D]; D even."""
    x, cos, sin = call.shape("input"), call.shape("r1"), call.shape("r2")
    if cos != sin or len(cos) != 4 or cos[2] != 1:
        return f"r1 is {cos} and r2 {sin}; both must be [B or 1, S, 1, D]"
    if cos[3] != x[3] or x[3] is None or x[3] % 2:
        return f"r1 has {cos[3]} entries, a head {x[3]} dims; they must agree and be even"
    batch, tokens, heads, _ = x
    if cos[0] not in (1, batch):
        return f"r1 has batch {cos[0]}, the input {batch}"
    if None not in (cos[1], tokens) and cos[1] != tokens:
        return f"r1 has {cos[1]} tokens, the input {tokens}"
    if heads is None or heads >= 1000 or (batch is not None and batch >= 1000):
        return f"batch {batch} and heads {heads} must be below 1000"
    if call["rotary_mode"] == "interleave" and call.target.product is not Product.A5:
        # The document does not say that ``rotate`` lifts either.
        if cos[0] != 1:
            return f"r1 has batch {cos[0]}; with rotary_mode 'interleave' one table serves the whole batch"
        if (rows := _product_of(batch, heads)) is not None and rows >= 1000:
            return f"batch {batch} times heads {heads} must be below 1000 with rotary_mode 'interleave'"
    return ""


def _rotary_inference_chip(call: Call) -> str:
    if call.target.product is not Product.INFERENCE:
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
    if mode == "half":
        return ""
    if mode != "interleave":
        return f"rotary_mode is {mode!r}; it must be 'half' or 'interleave'"
    if product is Product.A5:
        return "" if rotate is None else "rotate is not for this chip, which knows the mode itself"
    # Without the matrix torchair emits RotaryMul on these chips, which has no mode and rotates halves.
    if rotate is None:
        return "without rotate the graph engine ignores rotary_mode='interleave' on this chip"
    dim = call.shape("input")[-1]
    return "" if call.shape("rotate") == (dim, dim) else f"rotate is {call.shape('rotate')}; it must be {(dim, dim)}"


ROTARY_RULES = (_rotary_layout, _rotary_inference_chip, _rotary_mode)
