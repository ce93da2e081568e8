"""Registers operators with torch's dispatcher: schema, fake, kernels and the guard against autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NAMESPACE = "pagoda"
_PER_HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Fragments live as long as this module: a Library that is collected takes its registrations with it.
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def register_operator(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    cpu: Callable[..., Any],
    opaque: bool = False,
) -> torch._ops.OpOverload:
    """Define ``pagoda::<schema>`` and return its default overload; a second call with its name returns it.

    Args:
        schema: operator schema without the namespace.
        fake: shape, dtype and strides of the result, for tracing.
        reference: plain-torch meaning; runs on every device without a kernel of its own.
        cpu: what runs for CPU tensors.
        opaque: ``cpu`` also takes tensors in oneDNN's layouts; torch's dispatcher does not count them as CPU tensors.

    The operator has no derivative: with grad mode on and an input that requires grad it raises
    ``RuntimeError`` instead of returning a tensor cut from the autograd graph.
    """
    name = schema[: schema.index("(")]
    namespace = getattr(torch.ops, _NAMESPACE)
    if hasattr(namespace, name):
        return getattr(namespace, name).default
    # flexible_layout: every kernel takes any strides; inductor need not copy an input to restore its layout.
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    overload: torch._ops.OpOverload = getattr(namespace, name).default

    def refuse_autograd(*args: Any) -> Any:
        if torch.is_grad_enabled():
            for argument, given in zip(overload._schema.arguments, args, strict=False):
                tensors = given if isinstance(given, list | tuple) else (given,)
                if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
                    raise RuntimeError(
                        f"{_NAMESPACE}::{name} has no derivative, but {argument.name} requires grad; "
                        "call it under torch.inference_mode()"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    _library.impl(name, reference, "CompositeExplicitAutograd")
    _library.impl(name, cpu, "CPU")
    if opaque:
        _library.impl(name, cpu, "MkldnnCPU")
    _library.impl(name, refuse_autograd, "Autograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    return overload


def check_per_head(name: str, tensor: torch.Tensor | None, heads: int) -> None:
    """Raise ``ValueError`` unless ``tensor`` is None or has one floating-point entry per query head."""
    if tensor is not None and (tensor.shape != (heads,) or tensor.dtype not in _PER_HEAD_DTYPES):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
            f"it must have one fp32, bf16 or fp16 entry for each of the {heads} query heads"
        )


def like_input(input: torch.Tensor, *_: object) -> torch.Tensor:
    """The fake of an operator that yields a contiguous tensor of its first argument's shape and dtype."""
    return input.new_empty(input.shape)
