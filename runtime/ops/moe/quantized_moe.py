"""`pagoda::quantized_moe`: the routed experts of a mixture of experts with quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..arguments import MoeArguments
from ..linear.quantized_linear import quantized_linear_reference, quantized_linears_cpu
from ..linear.quantized_weight import Quantization
from ..registration import Facts, register_operator
from .moe import activate, activate_cpu, moe_reference, routed, rows_by_expert, weighted_sum

_SCHEMA = (
    "quantized_moe(Tensor input, Tensor topk_weights, Tensor topk_ids, Tensor up, Tensor down, Tensor? up_bias, "
    "Tensor? down_bias, str activation, float alpha, float limit, str layout, bool transposed, bool weight_input, "
    "int wide, int outputs, int[] up_scheme, int[] down_scheme, bool batch_invariant=False) -> Tensor"
)


_BEFORE = len(MoeArguments._fields) - 1


class _Packed(NamedTuple):
    """The arguments between those of ``pagoda::moe`` and its last.

    Attributes:
        wide: features of the first product.
        outputs: features of the second.
        up_scheme, down_scheme: the fields of a ``Quantization``.
    """

    wide: int
    outputs: int
    up_scheme: Sequence[int]
    down_scheme: Sequence[int]


def scheme_numbers(scheme: Quantization) -> list[int]:
    """A scheme as the operator takes it."""
    return list(scheme.numbers)


def quantized_moe_reference(*arguments: Any) -> torch.Tensor:
    """:func:`~torch_pagoda.runtime.ops.moe.moe.moe_reference` over rounded weights, by the products of
    :func:`~torch_pagoda.runtime.ops.linear.quantized_linear.quantized_linear_reference`.

    Args:
        arguments: the fields of :class:`MoeArguments`, whose ``up`` and ``down`` are uint8 ``[E, bytes]``, or not
            rounded yet; before the last how many features each product has, and the fields of their
            ``Quantization``.

    Returns:
        ``[N, outputs]`` in the dtype of ``input``, contiguous.

    Raises:
        ValueError: a packed weight is not of the size that its scheme asks for.
    """
    call, packed = _parted(arguments)
    if call.up.dtype is not torch.uint8:  # rounded when they are packed
        return moe_reference(*call)
    return routed(call, packed.outputs, partial(_expert, call, packed))


def quantized_moe_cpu(*arguments: Any) -> torch.Tensor:
    """:func:`quantized_moe_reference` by the kernel of quantized products: rows are sorted by expert once, and all
    experts share each of its two calls."""
    call, packed = _parted(arguments)
    if call.up.dtype is not torch.uint8:
        return moe_reference(*call)
    by_expert = rows_by_expert(call)

    def product(
        rows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int, scheme: Sequence[int]
    ) -> torch.Tensor:
        return quantized_linears_cpu(rows, weights, bias, by_expert.starts, outputs, Quantization.of_numbers(scheme))

    hidden = product(by_expert.rows, call.up, call.up_bias, packed.wide, packed.up_scheme)
    hidden = activate_cpu(hidden, call.activation, call.alpha, call.limit, call.layout)
    chosen = product(hidden, call.down, call.down_bias, packed.outputs, packed.down_scheme)
    return weighted_sum(call, chosen, by_expert.order)


def _parted(arguments: Sequence[Any]) -> tuple[MoeArguments[torch.Tensor], _Packed]:
    own = arguments[_BEFORE : _BEFORE + len(_Packed._fields)]
    return MoeArguments(*arguments[:_BEFORE], *arguments[_BEFORE + len(own) :]), _Packed(*own)


def _expert(call: MoeArguments[torch.Tensor], packed: _Packed, rows: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert over some rows, by the references."""
    up_bias = None if call.up_bias is None else call.up_bias[expert]
    down_bias = None if call.down_bias is None else call.down_bias[expert]
    product = quantized_linear_reference
    hidden = product(rows, call.up[expert], up_bias, packed.wide, *_told(packed.up_scheme))
    hidden = activate(hidden, call.activation, call.alpha, call.limit, call.layout)
    return product(hidden, call.down[expert], down_bias, packed.outputs, *_told(packed.down_scheme))


def _told(scheme: Sequence[int]) -> tuple[Any, ...]:
    return Quantization.of_numbers(scheme).arguments()


def _fake(*arguments: Any) -> torch.Tensor:
    call, packed = _parted(arguments)
    return call.input.new_empty(call.input.shape[0], packed.outputs)


quantized_moe = register_operator(
    _SCHEMA,
    Facts(over="rows", invariant=True, kind="moe", spelled_out=False),
    fake=_fake,
    reference=quantized_moe_reference,
    cpu=quantized_moe_cpu,
)
