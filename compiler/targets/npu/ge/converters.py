"""GE converters for NPU operators of CANN that torchair cannot convert, and changes to some of torchair's own.

Each is a function of the operator's arguments and ``meta_outputs`` that adds a node of CANN's own operator. Names and
order of inputs, outputs and attributes are those of the operator's prototype (``op_graph/*_proto.h``) in CANN's
ops-nn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .....runtime.npu_target import Product

_CHANGED = "changed_for_pagoda"
"""Attribute of changed converters."""
_FLOAT32 = 6

# operator of torch_npu → operator of CANN
CONVERTED = {
    "npu_gemma_rms_norm": "GemmaRmsNorm",
    "npu_add_layer_norm": "AddLayerNorm",
    "npu_add_rms_norm_quant": "AddRmsNormQuant",
}


@contextmanager
def registered_converters() -> Iterator[None]:
    """Give torchair our converters for the duration of a block; it converts when a graph is compiled.

    No graph of another's is to get them: that of npu_apply_rotary_pos_emb is right for what lowering makes alone.
    An operator that has a converter already keeps it, so a block within a block changes nothing. Needs torch_npu.
    """
    registered = _register()
    try:
        yield
    finally:
        for name in registered:
            operator = _overload(name)
            if name in CONVERTED:
                del operator._ge_converter
            else:
                operator._ge_converter = operator._ge_converter.__wrapped__


def _register() -> list[str]:
    """Names of the operators that got one of our converters."""
    import torchair
    from torchair._ge_concrete_graph.fx2ge_converter import _get_converter

    registered = []
    for name in CONVERTED:
        operator = getattr(torch.ops.npu, name).default
        if _get_converter(operator) is None:
            torchair.register_fx_node_ge_converter(operator)(_CONVERTERS[name])
            registered.append(name)
    for name, change in _CHANGES.items():
        operator = _overload(name)
        found = _get_converter(operator)
        if found is not None and not hasattr(found, _CHANGED):
            operator._ge_converter = change(found)
            setattr(operator._ge_converter, _CHANGED, True)
            registered.append(name)
    return registered


def _overload(name: str) -> Any:
    namespace, _, overload = name.rpartition(":")
    operator = getattr(torch.ops.aten if namespace else torch.ops.npu, overload.partition(".")[0])
    return getattr(operator, overload.partition(".")[2] or "default")


def _of_unsigned_scales(convert: Callable[..., Any]) -> Callable[..., Any]:
    """torchair's converter of npu_grouped_matmul for scales that int64 holds, which it casts to uint64 in each step:
    the same bits get the other name, as in its converter of npu_quant_matmul."""

    @functools.wraps(convert)
    def converted(*args: Any, scale: Any = None, **kwargs: Any) -> Any:
        from torchair._ge_concrete_graph import ge_apis
        from torchair.ge._ge_graph import DataType

        if scale:
            scale = [
                ge_apis.Bitcast(table, type=DataType.DT_UINT64) if table.dtype == DataType.DT_INT64 else table
                for table in scale
            ]
        return convert(*args, scale=scale, **kwargs)

    return converted


def _of_float32(convert: Callable[..., Any]) -> Callable[..., Any]:
    """torchair's converter of npu_grouped_matmul_swiglu_quant_v2, which takes ``dequant_dtype`` for uint8 where it is
    not given; the schema says float32, and graphs leave out what is the schema's."""

    @functools.wraps(convert)
    def converted(*args: Any, dequant_dtype: int = _FLOAT32, **kwargs: Any) -> Any:
        return convert(*args, dequant_dtype=dequant_dtype, **kwargs)

    return converted


def _of_second_version(convert: Callable[..., Any]) -> Callable[..., Any]:
    """MoeGatingTopKSoftmaxV2(x, finished?; k, renorm) → (y, expert_idx, softmax_result), in place of torchair's
    converter of npu_moe_gating_top_k_softmax_v2, which gives the first version's function arguments that it does not
    have. The prototype is in CANN's ops-transformer; the name of its flag for the third result is not torchair's.
    """

    @functools.wraps(convert)
    def converted(
        x: Any,
        *,
        k: int = 1,
        finished: Any = None,
        renorm: int = 0,
        output_softmax: bool = False,
        meta_outputs: Any = None,
    ) -> Any:
        from torchair import ge

        if output_softmax:
            raise RuntimeError("npu_moe_gating_top_k_softmax_v2: output_softmax is not converted")
        return ge.custom_op(
            "MoeGatingTopKSoftmaxV2",
            inputs={"x": x, "finished": finished},
            attrs={"k": ge.attr.Int(k), "renorm": ge.attr.Int(renorm)},
            outputs=["y", "expert_idx", "softmax_result"],
        )

    return converted


def _of_ends(convert: Callable[..., Any]) -> Callable[..., Any]:
    """torchair's converter of npu_moe_init_routing_v2, but on 310P, which has no MoeInitRoutingV3:
    MoeInitRoutingV2(x, expert_idx; expert_num, expert_tokens_count_or_cumsum_flag) → (expanded_x, expanded_row_idx,
    expert_tokens_count_or_cumsum, expert_tokens_before_capacity), which an eager call is there, too (op-plugin,
    ``MoeInitRoutingV2KernelNpuOpApi.cpp``). Its ends of each expert's rows are int32 and become the int64 that the
    grouped product reads. The definition is in CANN's ops-transformer."""

    @functools.wraps(convert)
    def converted(x: Any, expert_idx: Any, **kwargs: Any) -> Any:
        with_npu: Any = torch
        if not with_npu.npu.get_device_name().startswith(Product.INFERENCE.value):
            return convert(x, expert_idx, **kwargs)
        from torchair import ge
        from torchair._ge_concrete_graph import ge_apis
        from torchair.ge._ge_graph import DataType

        rows, places, ends, rest = ge.custom_op(
            "MoeInitRoutingV2",
            inputs={"x": x, "expert_idx": expert_idx},
            attrs={
                "expert_num": ge.attr.Int(kwargs["expert_num"]),
                "expert_tokens_count_or_cumsum_flag": ge.attr.Int(1),
            },
            outputs=[
                "expanded_x",
                "expanded_row_idx",
                "expert_tokens_count_or_cumsum",
                "expert_tokens_before_capacity",
            ],
        )
        return rows, places, ge_apis.Cast(ends, dst_type=DataType.DT_INT64), rest

    return converted


def _overwriting(convert: Callable[..., Any]) -> Callable[..., Any]:
    """torchair's converter of npu_apply_rotary_pos_emb without its copies of queries and keys, which CANN's
    ``ApplyRotaryPosEmbTensorMoveFusionPass`` (ops-transformer) removes, too, where nothing else reads these. Lowering
    gives the operator no others."""

    @functools.wraps(convert)
    def converted(
        query: Any,
        key: Any,
        cos: Any,
        sin: Any,
        layout: str = "BSND",
        rotary_mode: str = "half",
        meta_outputs: Any = None,
    ) -> Any:
        from torchair._ge_concrete_graph import ge_apis

        assert layout == "BSND"
        return ge_apis.ApplyRotaryPosEmb(query, key, cos, sin, layout=1, rotary_mode=rotary_mode)

    return converted


def _of_softplus(convert: Callable[..., Any]) -> Callable[..., Any]:
    """SoftplusV2(x; beta, threshold) → y, for torchair's converter of softplus, which raises; in float32, which every
    release has."""

    @functools.wraps(convert)
    def converted(self: Any, beta: float = 1.0, threshold: float = 20.0, meta_outputs: Any = None) -> Any:
        from torchair import ge
        from torchair._ge_concrete_graph import ge_apis
        from torchair.ge._ge_graph import DataType

        is_wide = self.dtype == DataType.DT_FLOAT
        result = ge.custom_op(
            "SoftplusV2",
            inputs={"x": self if is_wide else ge_apis.Cast(self, dst_type=DataType.DT_FLOAT)},
            attrs={"beta": ge.attr.Float(float(beta)), "threshold": ge.attr.Float(float(threshold))},
            outputs=["y"],
        )
        return result if is_wide else ge_apis.Cast(result, dst_type=self.dtype)

    return converted


def _of_mul(convert: Callable[..., Any]) -> Callable[..., Any]:
    """torchair's converter of mul casts the product to the dtype that it has: that of a node is not known when it has
    just been made."""

    @functools.wraps(convert)
    def converted(self: Any, other: Any, meta_outputs: Any = None) -> Any:
        from torchair._ge_concrete_graph import ge_apis
        from torchair._ge_concrete_graph.utils import dtype_promote
        from torchair.ge._ge_graph import DataType, Tensor

        if not all(isinstance(x, Tensor) and x.dtype != DataType.DT_BOOL for x in (self, other)):
            return convert(self, other, meta_outputs=meta_outputs)
        return ge_apis.Mul(*dtype_promote(self, other, target_dtype=meta_outputs.dtype))

    return converted


def _gemma_rms_norm(input: Any, gamma: Any, epsilon: float = 1e-6, meta_outputs: Any = None) -> Any:
    """y = x · rstd · (1 + gamma); GemmaRmsNorm(x, gamma; epsilon) → (y, rstd)."""
    from torchair import ge

    return ge.custom_op(
        "GemmaRmsNorm",
        inputs={"x": input, "gamma": gamma},
        attrs={"epsilon": ge.attr.Float(epsilon)},
        outputs=["y", "rstd"],
    )


def _add_layer_norm(
    x1: Any,
    x2: Any,
    gamma: Any,
    beta: Any,
    epsilon: float = 1e-5,
    additional_output: bool = False,
    meta_outputs: Any = None,
) -> Any:
    """AddLayerNorm(x1, x2, gamma, beta, bias?; epsilon, additional_output) → (y, mean, rstd, x = x1 + x2).

    Without ``additional_output`` x is not written.
    """
    from torchair import ge

    return ge.custom_op(
        "AddLayerNorm",
        inputs={"x1": x1, "x2": x2, "gamma": gamma, "beta": beta, "bias": None},
        attrs={"epsilon": ge.attr.Float(epsilon), "additional_output": ge.attr.Bool(additional_output)},
        outputs=["y", "mean", "rstd", "x"],
    )


def _add_rms_norm_quant(
    x1: Any,
    x2: Any,
    gamma: Any,
    scales1: Any,
    zero_points1: Any,
    beta: Any = None,
    scales2: Any = None,
    zero_points2: Any = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
    meta_outputs: Any = None,
) -> Any:
    """AddRmsNormQuant(x1, x2, gamma, scales1, scales2?, zero_points1?, zero_points2?; axis, epsilon, div_mode) →
    (y1, y2, x = x1 + x2).

    Only newer prototypes have ``beta`` and ``dst_type``, which stay what they are without.
    """
    from torchair import ge

    if beta is not None or dst_type not in (None, 1):
        raise RuntimeError("npu_add_rms_norm_quant: beta and dst_type are not converted")
    return ge.custom_op(
        "AddRmsNormQuant",
        inputs={
            "x1": x1,
            "x2": x2,
            "gamma": gamma,
            "scales1": scales1,
            "scales2": scales2,
            "zero_points1": zero_points1,
            "zero_points2": zero_points2,
        },
        attrs={"axis": ge.attr.Int(axis), "epsilon": ge.attr.Float(epsilon), "div_mode": ge.attr.Bool(div_mode)},
        outputs=["y1", "y2", "x"],
    )


_CHANGES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "npu_grouped_matmul": _of_unsigned_scales,
    "npu_grouped_matmul_swiglu_quant_v2": _of_float32,
    "aten:softplus": _of_softplus,
    "aten:mul.Tensor": _of_mul,
    "npu_moe_gating_top_k_softmax_v2": _of_second_version,
    "npu_apply_rotary_pos_emb": _overwriting,
    "npu_moe_init_routing_v2": _of_ends,
}
_CONVERTERS: dict[str, Callable[..., Any]] = {
    "npu_gemma_rms_norm": _gemma_rms_norm,
    "npu_add_layer_norm": _add_layer_norm,
    "npu_add_rms_norm_quant": _add_rms_norm_quant,
}
