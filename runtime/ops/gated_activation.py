"""`pagoda::gated_activation` and `pagoda::activation`: the elementwise middle of an MLP, gated (GLU) or not."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from .native import FLOAT_CODES, kernel_function
from .registration import Facts, like_input, register_operator

aten = torch.ops.aten

_SCHEMA = "gated_activation(Tensor gate, Tensor up, str activation, float alpha, float limit) -> Tensor"
_PLAIN_SCHEMA = "activation(Tensor input, str kind) -> Tensor"

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": aten.silu,
    "gelu": aten.gelu,
    "gelu_tanh": lambda x: aten.gelu(x, approximate="tanh"),
    "relu": aten.relu,
    "relu2": lambda x: aten.square(aten.relu(x)),
    "sigmoid": aten.sigmoid,
    "quick_gelu": lambda x: x * aten.sigmoid(1.702 * x),
}
_CLIPPED_SWIGLU = "clipped_swiglu"
# The numbers are the kernel's.
_CODES = {name: code for code, name in enumerate([*_FUNCTIONS, _CLIPPED_SWIGLU])}
# Field for field the struct GatedArguments of csrc/gated.cpp.
_ARGUMENTS = struct.Struct("=18q2d")


def gated_activation_reference(
    gate: torch.Tensor, up: torch.Tensor, activation: str, alpha: float, limit: float
) -> torch.Tensor:
    """``act(gate) * up`` (Shazeer 2020); in half precision ``act(gate)`` is rounded, then the product.

    Activations: ``silu``; ``gelu`` (erf); ``gelu_tanh``; ``relu``; ``relu2``, the square of relu; ``sigmoid``;
    ``quick_gelu``, ``x * sigmoid(1.702 x)``; and ``clipped_swiglu``, gpt-oss's
    ``g * sigmoid(alpha * g) * (u + 1)`` with ``g = min(gate, limit)`` and ``u = up`` clamped to ``±limit``. What
    eager torch computes in several steps (the last three but sigmoid) is rounded after every step, as there.

    Args:
        gate: ``[..., I]`` fp32, bf16 or fp16 (fp64 runs here). Any strides; often half of a merged product.
        up: the shape and dtype of ``gate``. Any strides.
        activation: one of the above.
        alpha: read by ``clipped_swiglu`` only, like ``limit``.
        limit: in units of the gate.

    Returns:
        ``[..., I]`` in the dtype of ``gate``, contiguous.

    Raises:
        ValueError: an unknown activation; shapes or dtypes that differ.
    """
    _check_gated(gate, up, activation)
    if activation == _CLIPPED_SWIGLU:
        gate = gate.clamp(min=None, max=limit)
        up = up.clamp(min=-limit, max=limit)
        return ((up + 1) * (gate * aten.sigmoid(gate * alpha))).contiguous()
    return (_FUNCTIONS[activation](gate) * up).contiguous()


def activation_reference(input: torch.Tensor, kind: str) -> torch.Tensor:
    """``act(input)``, elementwise.

    Args:
        input: any shape and strides, fp32, bf16 or fp16 (fp64 runs here).
        kind: an activation of :func:`gated_activation_reference`, ``clipped_swiglu`` excepted.

    Returns:
        The shape and dtype of ``input``, contiguous.

    Raises:
        ValueError: an unknown kind.
    """
    _check_kind("kind", kind, gated=False)
    return _FUNCTIONS[kind](input).contiguous()


def _check_kind(name: str, kind: str, *, gated: bool) -> None:
    if kind not in _FUNCTIONS and not (gated and kind == _CLIPPED_SWIGLU):
        known = [*_FUNCTIONS, _CLIPPED_SWIGLU] if gated else _FUNCTIONS
        raise ValueError(f"{name} is {kind!r}; it must be one of {', '.join(known)}")


def _check_gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    _check_kind("activation", activation, gated=True)
    if up.shape != gate.shape or up.dtype is not gate.dtype:
        raise ValueError(
            f"up has shape {tuple(up.shape)} and dtype {up.dtype}, gate {tuple(gate.shape)} and {gate.dtype}; "
            "expand or convert one of them"
        )


def gated_activation_cpu(
    gate: torch.Tensor, up: torch.Tensor, activation: str, alpha: float, limit: float
) -> torch.Tensor:
    """:func:`gated_activation_reference` by the C++ kernel, for CPU tensors; else the reference."""
    _check_gated(gate, up, activation)
    result = _run(gate, up, activation, alpha, limit)
    return gated_activation_reference(gate, up, activation, alpha, limit) if result is None else result


def activation_cpu(input: torch.Tensor, kind: str) -> torch.Tensor:
    """:func:`activation_reference` by the C++ kernel, for CPU tensors, like :func:`gated_activation_cpu`."""
    _check_kind("kind", kind, gated=False)
    result = _run(input, None, kind, 0.0, 0.0)
    return activation_reference(input, kind) if result is None else result


def _run(
    gate: torch.Tensor, up: torch.Tensor | None, activation: str, alpha: float, limit: float
) -> torch.Tensor | None:
    """``act(gate)``, times ``up`` if there is one; None where the kernel does not run."""
    code = FLOAT_CODES.get(gate.dtype)
    kernel = kernel_function("pagoda_gated_activation")
    if kernel is None or code is None:
        return None
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if gate.is_contiguous() and (up is None or up.is_contiguous()):
        sizes: tuple[int, ...] = (1, 1, 1, gate.numel())
        gate_strides: tuple[int, ...] = (0, 0, 0, 1)
        up_strides = gate_strides
    else:
        if gate.dim() > 4:
            gate = gate.flatten(0, -2)
            up = None if up is None else up.flatten(0, -2)
        sizes = (1, 1, 1, *gate.shape)[-4:]
        gate_strides = (0, 0, 0, *gate.stride())[-4:]
        up_strides = gate_strides if up is None else (0, 0, 0, *up.stride())[-4:]
    kernel(
        _ARGUMENTS.pack(
            gate.data_ptr(),
            *gate_strides,
            0 if up is None else up.data_ptr(),
            *up_strides,
            result.data_ptr(),
            code,
            _CODES[activation],
            *sizes,
            torch.get_num_threads(),
            alpha,
            limit,
        )
    )
    return result


gated_activation = register_operator(
    _SCHEMA,
    Facts(over="elements", invariant=True, kind="gated_mlp", spelled_out=True),
    fake=like_input,
    reference=gated_activation_reference,
    cpu=gated_activation_cpu,
)
activation = register_operator(
    _PLAIN_SCHEMA,
    Facts(over="elements", invariant=True, kind="activation", spelled_out=True),
    fake=like_input,
    reference=activation_reference,
    cpu=activation_cpu,
)
