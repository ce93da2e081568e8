"""GE converters for NPU operators that CANN has and torchair has no converter for, and a change to one that it has.

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

_UNSIGNED = "reads_int64_as_uint64"
"""Attribute of the changed converter."""

# operator of torch_npu → operator of CANN
CONVERTED = {"npu_gemma_rms_norm": "GemmaRmsNorm", "npu_add_layer_norm": "AddLayerNorm"}


def register_converters() -> list[str]:
    """Give torchair our converters; names of the operators that got one.

    An operator that has one already keeps it, so calling this again does nothing. Needs torch_npu.
    """
    import torchair
    from torchair._ge_concrete_graph.fx2ge_converter import _get_converter

    registered = []
    for name in CONVERTED:
        operator = getattr(torch.ops.npu, name).default
        if _get_converter(operator) is None:
            torchair.register_fx_node_ge_converter(operator)(_CONVERTERS[name])
            registered.append(name)
    grouped = torch.ops.npu.npu_grouped_matmul.default
    found = _get_converter(grouped)
    if found is not None and not hasattr(found, _UNSIGNED):
        grouped._ge_converter = _of_unsigned_scales(found)  # type: ignore[attr-defined]
        registered.append("npu_grouped_matmul")
    return registered


@contextmanager
def registered_converters() -> Iterator[None]:
    """``register_converters`` for the duration of a block."""
    registered = register_converters()
    try:
        yield
    finally:
        for name in registered:
            operator = getattr(torch.ops.npu, name).default
            if name in CONVERTED:
                del operator._ge_converter
            else:
                operator._ge_converter = operator._ge_converter.__wrapped__


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

    setattr(converted, _UNSIGNED, True)
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


_CONVERTERS: dict[str, Callable[..., Any]] = {
    "npu_gemma_rms_norm": _gemma_rms_norm,
    "npu_add_layer_norm": _add_layer_norm,
}
