"""Limits of norms and activations."""

from __future__ import annotations

import torch

from .call import Call
from .quantized import norm_by_scales, one_quantized_result
from .rules import (
    A2,
    A3,
    A5,
    FLOAT,
    HALF,
    INFERENCE,
    Limits,
    dense,
    given,
    in_reference,
    lowered,
    on_inference_chip,
    shaped,
)

_LAST_DIMS = "gamma [*G, N], beta [*G, N], input [*B, *G, N], x1 [*B, *G, N], x2 [*B, *G, N]"


def _last_dim(call: Call) -> str:
    x, gamma = call.shape(next(iter(call.arguments))), call.shape("gamma")
    return "" if len(gamma) == 1 and gamma[0] == x[-1] else f"gamma is {gamma}, the input {x}"


def _own_dtype_or_float32(call: Call) -> str:
    if call.dtype("gamma") in (call.dtype("input"), torch.float32):
        return ""
    return f"gamma is {call.dtype('gamma')}; it must have the dtype of the input or be float32"


def _sum_of_layer_norm(call: Call) -> str:
    """Summands of one dtype, or one in float32 beside another; gamma and beta of the sum's dtype, or in float32."""
    dtypes = {tensor.dtype for name in ("x1", "x2") if (tensor := call.tensor(name)) is not None}
    total = torch.float32 if len(dtypes) > 1 else next(iter(dtypes))
    if len(dtypes) > 1 and (torch.float32 not in dtypes or torch.float64 in dtypes):
        return f"x1 is {call.dtype('x1')} and x2 {call.dtype('x2')}; they must have one dtype, or one be float32"
    for name in ("gamma", "beta"):
        tensor = call.tensor(name)
        if tensor is not None and tensor.dtype not in (total, torch.float32):
            return f"{name} is {tensor.dtype}; it must have the dtype of the sum or be float32"
    return ""


def _even_split(call: Call) -> str:
    name = "input" if "input" in call.arguments else "x"
    shape, dim = call.shape(name), call.arguments.get("dim", -1)
    size = shape[dim] if -len(shape) <= dim < len(shape) else None
    return f"dim {dim} is {size}; it must be even" if size is None or size % 2 else ""


LIMITS = {
    "npu_rms_norm": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"input": FLOAT, "gamma": FLOAT},
        rules=[
            shaped(_LAST_DIMS),
            lowered(_last_dim),
            _own_dtype_or_float32,
            on_inference_chip(
                lambda c: "" if c.dtype("gamma") is c.dtype("input") else "gamma must have the dtype of the input"
            ),
        ],
    ),
    # Of 950 this operator's documents name Ascend 950DT alone. Taken for 950PR as well; to be confirmed on a device.
    "npu_add_rms_norm": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"x1": FLOAT},
        alike=[("x1", "x2", "gamma")],
        rules=[shaped(_LAST_DIMS), lowered(_last_dim)],
    ),
    "npu_add_rms_norm_cast": Limits(
        frozenset(), {"x1": FLOAT}, alike=[("x1", "x2", "gamma")], rules=[shaped(_LAST_DIMS)]
    ),
    "npu_gemma_rms_norm": Limits(
        frozenset({A2, A3, A5}),
        {"input": FLOAT},
        alike=[("input", "gamma")],
        mixes=True,
        rules=[shaped(_LAST_DIMS), lowered(_last_dim), _own_dtype_or_float32],
    ),
    "npu_add_layer_norm": Limits(
        frozenset({A2, A3, A5}),
        {"x1": FLOAT, "x2": FLOAT},
        alike=[("x1", "x2"), ("gamma", "beta")],
        mixes=True,
        rules=[
            shaped(_LAST_DIMS),
            lowered(_last_dim),
            in_reference(_sum_of_layer_norm),
        ],
    ),
    "npu_add_rms_norm_dynamic_quant": Limits(
        frozenset({A2, A3, A5}),
        {"x1": HALF},
        alike=[("x1", "x2", "gamma")],
        ranks={"x1": tuple(range(2, 9)), "gamma": (1,)},
        rules=[shaped(_LAST_DIMS), lowered(_last_dim), lowered(one_quantized_result)],
    ),
    "npu_add_rms_norm_quant": Limits(
        frozenset({A2, A3, INFERENCE}),
        {"x1": HALF},
        alike=[("x1", "x2", "gamma")],
        ranks={"x1": tuple(range(1, 9)), "gamma": (1,), "scales1": (1,), "zero_points1": (1,)},
        rules=[
            shaped(f"{_LAST_DIMS}, scales1 [*G, N], zero_points1 [*G, N]"),
            lowered(_last_dim),
            lowered(norm_by_scales),
        ],
    ),
    # op-plugin names A2 alone; vllm-ascend runs it on the others (``_310p/ops/activation.py``, for instance).
    "npu_swiglu": Limits(frozenset({A2, A3, A5, INFERENCE}), {"input": FLOAT}, rules=[_even_split, dense("input")]),
    "npu_geglu": Limits(
        frozenset({A2, A3, A5}), {"input": FLOAT}, rules=[_even_split, given("approximate", 0, 1), dense("input")]
    ),
    "npu_clipped_swiglu": Limits(
        frozenset({A2, A3, A5}), {"x": FLOAT}, rules=[shaped("x [*B, M, N]"), _even_split, dense("x")]
    ),
    "npu_gelu": Limits(
        frozenset({A2, A3, A5, INFERENCE}), {"input": FLOAT}, rules=[given("approximate", "none", "tanh")]
    ),
    "npu_gelu_mul": Limits(frozenset(), {"input": FLOAT}, rules=[_even_split, given("approximate", "none", "tanh")]),
    # Other chips compute another formula under this name.
    "npu_fast_gelu": Limits(frozenset({A2, A3}), {"input": FLOAT}),
}
