"""Steps that several readers of quantised tensors share: unpacking, packing, and the checks of what was read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ...runtime.ops.stored_weight import StoredWeight
from ...runtime.ops.weight_format import SCALE_DTYPES, InputScale, WeightFormat

Read: TypeAlias = "Callable[[Quantized], dict[str, torch.Tensor]]"
"""A reader: from the tensors beside a module to those that a float checkpoint would have there."""


_EXPERT = re.compile(r"\.experts\.\d+\.")


class BadTensor(ValueError):
    """A tensor of a quantised checkpoint that cannot be read. The message names it."""


@dataclass(frozen=True)
class Quantized:
    """A module of a checkpoint whose weight is stored in several tensors.

    Attributes:
        name: of the module.
        tensors: last part of the name → tensor.
        settings: what the config says of the method and of this module.
        dtype: that the weight is to be shown in.
        kind: what a description says of the weight, where there is one.
        keys: last part of the name → the whole of it, where that is not the module's and the last part.
        seen: last parts of the names of what was read, or is known to change nothing.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]
    dtype: torch.dtype
    kind: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set, repr=False, compare=False)

    def key(self, leaf: str) -> str:
        """The whole name of a tensor."""
        return self.keys.get(leaf, f"{self.name}.{leaf}")

    def take(self, leaf: str, *dtypes: torch.dtype, dim: int | None = None) -> torch.Tensor:
        """A tensor of the module.

        Raises:
            BadTensor: it is missing, or of another dtype or number of dims.
        """
        tensor = self.tensors.get(leaf)
        self.seen.add(leaf)
        if tensor is None:
            there = ", ".join(sorted(self.tensors))
            raise BadTensor(f"it lacks {self.key(leaf)!r} beside {there}; get the checkpoint again")
        if (dtypes and tensor.dtype not in dtypes) or (dim is not None and tensor.dim() != dim):
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.bad(leaf, f"{wanted}{f' with {dim} dims' if dim is not None else ''} is needed")
        return tensor

    def ignore(self, *leaves: str) -> None:
        """Say of tensors, which need not be there, that the weight is the same without them."""
        self.seen.update(leaves)

    def check_all_read(self) -> None:
        """Refuse a module with tensors that nobody read.

        Raises:
            BadTensor: it names the first.
        """
        for leaf in self.tensors:
            if leaf not in self.seen:
                raise self.bad(
                    leaf, "it is not read, and the weight beside it might be another; pass the float checkpoint"
                )

    def bad(self, leaf: str, what: str) -> BadTensor:
        """The error for a tensor, with what it is and what is needed."""
        tensor = self.tensors[leaf]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return BadTensor(f"{self.key(leaf)!r} is {dtype} {list(tensor.shape)}; {what}")

    def scales(self, leaf: str, dim: int | None = 2) -> torch.Tensor:
        """The scales in that tensor, of a dtype that is kept.

        Raises:
            BadTensor: it is missing, no float, or holds a NaN, an infinity or a zero.
        """
        scales = self.take(leaf, *SCALE_DTYPES.values(), dim=dim)
        self.check_scales(leaf, scales)
        return scales

    def check_scales(self, leaf: str, scales: torch.Tensor) -> None:
        """Refuse scales that make no weight.

        Raises:
            BadTensor: one is NaN, infinite or 0.
        """
        if not bool(scales.isfinite().all()) or bool((scales == 0).any()):
            raise self.bad(leaf, "a scale in it is NaN, infinite or 0; the file is broken, get it again")

    def input_scale(self, offset: str) -> InputScale:
        """The scale and the offset of its inputs, ``input_scale`` and what that leaf holds; without that 0.

        Raises:
            BadTensor: one is missing, not one number, or none that inputs of 8 bits are rounded by.
        """
        scale = self.scales("input_scale", dim=None)
        if scale.numel() != 1:
            raise self.bad("input_scale", "one number is needed, for all inputs")
        if float(scale) < 0:
            raise self.bad("input_scale", f"it is {float(scale):.3g}, and scales are positive; get the file again")
        if offset not in self.tensors:
            return InputScale(float(scale))
        found = self.take(offset)
        if found.numel() != 1 or found.dtype is torch.bool or found.is_complex():
            raise self.bad(offset, "one number is needed, for all inputs")
        number = found.double().item()
        if number not in range(-128, 128):
            raise self.bad(offset, f"it is {number:.6g}; a whole number from -128 to 127 is needed")
        return InputScale(float(scale), int(number))

    def stored(
        self,
        form: WeightFormat,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        **more: Any,
    ) -> StoredWeight:
        """The weight of these parts.

        Raises:
            BadTensor: they do not fit each other.
        """
        try:
            return StoredWeight(form, codes, scales, zeros, order, dtype=self.dtype, **more)
        except ValueError as error:
            raise BadTensor(f"the weight of {self.name!r} cannot be read: {error}") from error

    @property
    def rest(self) -> dict[str, torch.Tensor]:
        """Its bias, where it has one, under its full name."""
        return {f"{self.name}.bias": self.take("bias")} if "bias" in self.tensors else {}


def is_expert(name: str) -> bool:
    """Tell whether a module is one of several experts, by its name."""
    return _EXPERT.search(name) is not None


def scale_name(dtype: torch.dtype) -> str:
    """The name of a dtype of scales in a ``WeightFormat``."""
    return next(name for name, known in SCALE_DTYPES.items() if known is dtype)


def group_of(module: Quantized, inputs: int, groups: int) -> int:
    """Inputs that share a scale, of so many groups; 0: all.

    Raises:
        BadTensor: they are not those of the group size in the settings, or without one do not divide the inputs.
    """
    stated = next((module.settings[key] for key in ("group_size", "q_group_size") if key in module.settings), None)
    if isinstance(stated, int) and stated:
        size = stated if 0 < stated < inputs else inputs
        if math.ceil(inputs / size) != groups:
            raise BadTensor(
                f"{module.name!r} has {groups} groups of scales for {inputs} inputs, and its config states "
                f"group_size={stated}; get the checkpoint again"
            )
        return size if groups > 1 else 0
    if groups == 1:
        return 0
    if inputs % groups == 0:
        return inputs // groups
    raise BadTensor(f"{module.name!r} has {groups} groups of scales for {inputs} inputs, which they do not divide")


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unsigned numbers of ``bits`` bits from the stream of bits in int32 words along the last dim, lowest first.

    Args:
        words: int32 ``[..., W]``.
        bits: of a number, at most 8.
        count: of the numbers that are wanted.

    Returns:
        uint8 ``[..., count]``.

    Raises:
        ValueError: there are fewer.
    """
    if words.shape[-1] * 32 // bits < count:
        raise ValueError(f"{words.shape[-1]} words of 32 bits hold no {count} numbers of {bits} bits")
    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream[..., :count]
    if bits in (2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((stream[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)[..., :count]
    each = ((stream[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)
    each = each[..., : count * bits].unflatten(-1, (count, bits))
    return (each << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def pack_pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits, uint8 ``[..., N]`` with an even N, two in a byte, the first in its low half."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """The scales that e8m0 bytes stand for, bfloat16: ``2^(byte - 127)``; NaN for 255."""
    scales = torch.exp2(exponents.float() - 127)
    return torch.where(exponents == 255, torch.nan, scales).to(torch.bfloat16)
