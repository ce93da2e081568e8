"""Registers operators: schema, fake, kernels and the guard against autograd with torch, facts for the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

_NAMESPACE = "pagoda"
_PER_HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Fragments live as long as this module: a Library that is collected takes its registrations with it.
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of an operator that passes and reports query. There are no defaults: each operator must state them.

    Attributes:
        over: the operands that a part of a result depends on. "elements": those at its index, after broadcasting.
            "rows": those in its row of ``[..., rows, features]``, and operands that have no rows. "sequences": those
            of its sequence, as the metadata of a flat step tells. "all": any; it is taken to mix tokens.
        invariant: a token's result has the same bits whatever else is in the batch, for any number of threads; with
            ``batch_invariant=True`` where the schema has that argument.
        kind: what explain counts it as, one of its ``KINDS``; "" for none.
        spelled_out: in a graph for an NPU its reference may replace it, as ATen operators.
    """

    over: Literal["elements", "rows", "sequences", "all"]
    invariant: bool
    kind: str
    spelled_out: bool


@dataclass(frozen=True)
class Operator:
    """A registered operator.

    Attributes:
        reference: plain-torch meaning; runs on every device without a kernel of its own.
        cpu: what runs for CPU tensors. Called directly it saves the dispatcher, which costs more than a small kernel.
            It takes all of the schema's arguments, by position, and nothing is guarded: the tensors must be on the
            CPU, and the result of an input that requires grad is simply cut from the autograd graph.
        facts: what passes and reports ask about it.
    """

    reference: Callable[..., Any]
    cpu: Callable[..., Any]
    facts: Facts


OPERATORS: dict[torch._ops.OpOverload, Operator] = {}
"""Every registered operator, by the overload that stands for it in graphs."""


def register_operator(
    schema: str,
    facts: Facts,
    *,
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    cpu: Callable[..., Any],
    opaque: bool = False,
) -> torch._ops.OpOverload:
    """Define ``pagoda::<schema>`` and return its default overload; a second call with its name returns it.

    Args:
        schema: operator schema without the namespace.
        facts: what passes and reports ask about it.
        fake: shape, dtype and strides of the result, for tracing.
        reference: as in :class:`Operator`, like ``cpu``.
        opaque: ``cpu`` also takes tensors in oneDNN's layouts; torch's dispatcher does not count them as CPU tensors.

    The operator has no derivative: with grad mode on and an input that requires grad it raises
    ``RuntimeError`` instead of returning a tensor cut from the autograd graph.
    """
    name = schema[: schema.index("(")]
    namespace = getattr(torch.ops, _NAMESPACE)
    known = hasattr(namespace, name)
    if not known:
        # flexible_layout: every kernel takes any strides; inductor need not copy an input to restore its layout.
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    overload: torch._ops.OpOverload = getattr(namespace, name).default
    # As in the dispatcher, the first registration stays.
    OPERATORS.setdefault(overload, Operator(reference, cpu, facts))
    if known:
        return overload

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
