"""Helpers that several readers of quantized tensors share: unpacking, packing, and checks of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...compiler.weights.file_pages import will_read
from ...passes.graph.cut import ZERO, Cut
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.ops.linear.weight_format import SCALE_DTYPES, InputScale, WeightFormat

Read: TypeAlias = "Callable[[Quantized], dict[str, torch.Tensor]]"
"""A reader: from the tensors of a quantized module to those of a float checkpoint."""


_EXPERT = re.compile(r"\.experts\.\d+\.")


class BadTensor(ValueError):
    """A tensor of a quantized checkpoint that cannot be read. The message names it."""


@dataclass(frozen=True)
class Held:
    """The outputs and inputs that are read of a weight.

    Attributes:
        outputs: their indices, in order; None: all.
        inputs: the first, and the one behind the last; None: all.
    """

    outputs: NDArray[np.int64] | None = None
    inputs: tuple[int, int] | None = None

    def within(self, cuts: Sequence[Cut]) -> list[Cut]:
        """Return cuts of the weight, each for one rank, as cuts of what is held."""
        found = []
        for cut in cuts:
            held = self.outputs if cut.dim == 0 else None if self.inputs is None else np.arange(*self.inputs)
            assert held is not None
            indices = cut.indices[0]
            found.append(Cut(cut.dim, (np.where(indices == ZERO, ZERO, np.searchsorted(held, indices)),)))
        return found


@dataclass(frozen=True)
class Layout:
    """How a weight ``[out, in]`` lies in the files.

    Attributes:
        outputs, inputs: its sizes.
        output_unit, input_unit: how many are read together.
    """

    outputs: int
    inputs: int
    output_unit: int
    input_unit: int

    def holding(self, cuts: Sequence[Cut]) -> Held:
        """Return what is read of the weight where these cuts, each for one rank, leave a part of it."""
        held = Held()
        for cut in cuts:
            unit = self.input_unit if cut.dim else self.output_unit
            given = cut.indices[0][cut.indices[0] != ZERO]
            units = np.unique(given // unit) if len(given) else np.zeros(1, np.int64)
            if cut.dim:
                held = replace(held, inputs=(int(units[0]) * unit, min((int(units[-1]) + 1) * unit, self.inputs)))
            else:
                held = replace(held, outputs=(units[:, None] * unit + np.arange(unit)).ravel())
        return held


@dataclass(frozen=True)
class Quantized:
    """A module of a checkpoint whose weight is stored in several tensors.

    Attributes:
        name: name of the module.
        tensors: last part of the name → tensor.
        settings: the config's settings of the method for this module.
        dtype: dtype that the weight appears in.
        kind: kind of the weight in a description, if there is one.
        keys: last part of the name → whole name, if that is not the module's name plus the last part.
        held: outputs and inputs that are read of the weight, where the reader has a ``Layout``.
        seen: last name parts of the tensors that were read, or are known to have no effect.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, Any]
    dtype: torch.dtype
    kind: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    held: Held = Held()
    seen: set[str] = field(default_factory=set, repr=False, compare=False)

    def key(self, leaf: str) -> str:
        """Return the whole name of a tensor."""
        return self.keys.get(leaf, f"{self.name}.{leaf}")

    def take(self, leaf: str, *dtypes: torch.dtype, dim: int | None = None) -> torch.Tensor:
        """Return a tensor of the module and mark it as read.

        Raises:
            BadTensor: it is missing, or has another dtype or number of dims.
        """
        tensor = self.tensors.get(leaf)
        self.seen.add(leaf)
        if tensor is None:
            there = ", ".join(sorted(self.tensors))
            raise BadTensor(f"it has {there} but lacks {self.key(leaf)!r}; download the checkpoint again")
        if (dtypes and tensor.dtype not in dtypes) or (dim is not None and tensor.dim() != dim):
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.bad(leaf, f"expected {wanted}{f' with {dim} dims' if dim is not None else ''}")
        return tensor

    def held_of(self, table: torch.Tensor, inputs: int | Fraction, outputs: int = 1) -> torch.Tensor:
        """Return what is held of a table, each row of which stands for so many inputs and each column for so many
        outputs."""
        if self.held.inputs is not None:
            first, end = self.held.inputs
            table = table[first // inputs : -(-end // inputs)]
        columns = [table]
        if self.held.outputs is not None:
            runs = Cut(1, (self.held.outputs[::outputs] // outputs,)).runs[0]
            columns = [table.narrow(1, first, count) for first, count in runs]
        will_read(columns)
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)

    def ignore(self, *leaves: str) -> None:
        """Mark tensors, which may be missing, as having no effect on the weight."""
        self.seen.update(leaves)

    def check_all_read(self) -> None:
        """Check that every tensor of the module was read.

        Raises:
            BadTensor: one was not; the message names the first.
        """
        for leaf in self.tensors:
            if leaf not in self.seen:
                raise self.bad(leaf, "it is not supported and may change the weight; pass the float checkpoint")

    def bad(self, leaf: str, what: str) -> BadTensor:
        """Return the error for a tensor, with its dtype and shape and the reason."""
        tensor = self.tensors[leaf]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return BadTensor(f"{self.key(leaf)!r} is {dtype} {list(tensor.shape)}; {what}")

    def scales(self, leaf: str, dim: int | None = 2) -> torch.Tensor:
        """Return the scales in a tensor, checked, in their own dtype.

        Raises:
            BadTensor: it is missing, not of a float dtype, or contains a NaN, an infinity or a zero.
        """
        scales = self.take(leaf, *SCALE_DTYPES.values(), dim=dim)
        self.check_scales(leaf, scales)
        return scales

    def check_scales(self, leaf: str, scales: torch.Tensor) -> None:
        """Check that scales are finite and not 0.

        Raises:
            BadTensor: a scale is NaN, infinite or 0.
        """
        if not bool(scales.isfinite().all()) or bool((scales == 0).any()):
            raise self.bad(leaf, "a scale in it is NaN, infinite or 0; the file is broken, download it again")

    def input_scale(self, offset: str) -> InputScale:
        """Return the input scale and offset: ``input_scale``, and the tensor named ``offset``, or 0 without it.

        Raises:
            BadTensor: one is missing, not a single number, or not valid for 8-bit inputs.
        """
        scale = self.scales("input_scale", dim=None)
        if scale.numel() != 1:
            raise self.bad("input_scale", "expected one number for all inputs")
        if float(scale) < 0:
            raise self.bad("input_scale", f"it is {float(scale):.3g}, not positive; download the file again")
        if offset not in self.tensors:
            return InputScale(float(scale))
        found = self.take(offset)
        if found.numel() != 1 or found.dtype is torch.bool or found.is_complex():
            raise self.bad(offset, "expected one number for all inputs")
        number = found.double().item()
        if number not in range(-128, 128):
            raise self.bad(offset, f"it is {number:.6g}; expected an integer from -128 to 127")
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
        """Build the weight from these parts.

        Raises:
            BadTensor: the parts do not match.
        """
        try:
            return StoredWeight(form, codes, scales, zeros, order, dtype=self.dtype, **more)
        except ValueError as error:
            raise BadTensor(f"the weight of {self.name!r} cannot be read: {error}") from error

    @property
    def rest(self) -> dict[str, torch.Tensor]:
        """Return the module's bias under its full name, if it has one."""
        return {f"{self.name}.bias": self.take("bias")} if "bias" in self.tensors else {}


def is_expert(name: str) -> bool:
    """Return True if the name is that of one of several experts."""
    return _EXPERT.search(name) is not None


def scale_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype of scales in a ``WeightFormat``."""
    return next(name for name, known in SCALE_DTYPES.items() if known is dtype)


def group_of(module: Quantized, inputs: int, groups: int) -> int:
    """Return the number of inputs that share one of ``groups`` scales; 0: all.

    Raises:
        BadTensor: it differs from the group size in the settings, or the groups do not divide the inputs.
    """
    stated = next((module.settings[key] for key in ("group_size", "q_group_size") if key in module.settings), None)
    if isinstance(stated, int) and stated:
        size = stated if 0 < stated < inputs else inputs
        if math.ceil(inputs / size) != groups:
            raise BadTensor(
                f"{module.name!r} has {groups} groups of scales for {inputs} inputs, but its config states "
                f"group_size={stated}; download the checkpoint again"
            )
        return size if groups > 1 else 0
    if groups == 1:
        return 0
    if inputs % groups == 0:
        return inputs // groups
    raise BadTensor(f"the {inputs} inputs of {module.name!r} are not a multiple of its {groups} groups of scales")


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack unsigned numbers of ``bits`` bits from the bits of int32 words along the last dim, lowest first.

    Args:
        words: int32 ``[..., W]``.
        bits: bits of a number, at most 8.
        count: how many numbers to return.

    Returns:
        uint8 ``[..., count]``.

    Raises:
        ValueError: the words contain fewer.
    """
    if words.shape[-1] * 32 // bits < count:
        raise ValueError(f"{words.shape[-1]} words of 32 bits do not hold {count} numbers of {bits} bits")
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
    """Pack numbers of 4 bits, uint8 ``[..., N]`` with an even N, two in a byte, the first in its low half."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return the scales of e8m0 bytes, bfloat16: ``2^(byte - 127)``; NaN for 255."""
    scales = torch.exp2(exponents.float() - 127)
    return torch.where(exponents == 255, torch.nan, scales).to(torch.bfloat16)
