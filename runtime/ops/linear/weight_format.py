"""The storage formats of quantized weights: the meaning of codes, and the scale of each."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

CODES = ("int", "e4m3", "e2m1", "affine")
"""Kinds of codes, in the order of the kernels' numbers for them."""

BITS = {"int": (4, 8), "affine": (4, 8), "e2m1": (4,), "e4m3": (8,)}
"""Of the kinds of code."""

SCALE_DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
"""Names of scales, as they are stored."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; 8 to 15 are the same with a minus."""

_SPELLED = re.compile(
    r"(int4|int8|affine4|affine8|e2m1|e4m3)/(row|g\d+)/(f32|bf16|f16)(\+z)?(\+order)?(/x8(?:static)?)?"
)


class InputScale(NamedTuple):
    """Rounding of a layer's inputs that was settled when its weight was rounded, for all rows alike.

    ``q = clamp(round(x / scale + offset), -128, 127)``, ties to even, in float32; it stands for
    ``(q - offset) * scale``.

    Attributes:
        scale: positive, a float32 number.
        offset: from -128 to 127.
    """

    scale: float
    offset: int = 0


@dataclass(frozen=True)
class WeightFormat:
    """A format of the weight ``[out, in]`` of a linear layer.

    ``w[n, order[k]] = (value(codes[n, k]) - zeros[n, k // group]) * scales[n, k // group]``; for affine ones
    ``codes[n, k] * scales[n, k // group] - zeros[n, k // group]``.

    Attributes:
        code: ``"int"``: unsigned numbers, around ``2^(bits - 1)`` where there are no zeros; ``"e2m1"``: floats of 4
            bits (OCP MX); ``"e4m3"``: ``torch.float8_e4m3fn``; ``"affine"``: unsigned numbers whose groups have an
            offset in floats instead of zeros (the k-quants of ggml).
        bits: of a code, 4 or 8.
        group_size: inputs that share a scale; 0: all.
        scale: dtype of the scales, ``"f32"``, ``"bf16"`` or ``"f16"``: as stored, never rounded again.
        zeros: each group has the code that stands for zero.
        ordered: the columns of the codes are those of the weight in another order.
        input_bits: 8: its makers meant it for inputs of 8 bits with a scale for each row, taken as they come; 0: for
            inputs as they are.
        static_inputs: the weight comes with an ``InputScale``, which replaces the scales of rows.
    """

    code: str
    bits: int
    group_size: int
    scale: str = "f32"
    zeros: bool = False
    ordered: bool = False
    input_bits: int = 0
    static_inputs: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS.get(self.code, ()):
            raise ValueError(f"codes of {self.bits} bits that are {self.code!r} are not supported; use one of {BITS}")
        if self.scale not in SCALE_DTYPES:
            raise ValueError(f"scale={self.scale!r} is not supported; use one of {', '.join(SCALE_DTYPES)}")
        if self.group_size < 0:
            raise ValueError(f"group_size={self.group_size} is negative; use 0 for one scale per output")
        if self.input_bits not in (0, 8):
            raise ValueError(f"input_bits={self.input_bits} is not supported; use 8, or 0 for inputs as they are")
        if self.static_inputs and (self.code, self.bits, self.group_size, self.input_bits) != ("int", 8, 0, 8):
            raise ValueError(
                f"static_inputs=True of {self.code}{self.bits} is not supported; int8 with rows has them"
            )
        if self.zeros and self.code != "int":  # affine ones always have offsets
            raise ValueError(f"zeros of {self.code!r} codes are not supported")

    def __str__(self) -> str:
        group = f"g{self.group_size}" if self.group_size else "row"
        code = f"{self.code}{self.bits}" if self.code in ("int", "affine") else self.code
        inputs = f"/x8{'static' * self.static_inputs}" if self.input_bits == 8 else ""
        return f"{code}/{group}/{self.scale}{'+z' * self.zeros}{'+order' * self.ordered}{inputs}"

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> WeightFormat:
        """The format that ``str`` spells.

        Raises:
            ValueError: it spells none.
        """
        found = _SPELLED.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a weight format; write it like 'int4/g128/f16+z'")
        code, group, scale, zeros, ordered, inputs = found.groups()
        kind = code if code in BITS else code[:-1]
        bits = BITS[code][0] if code in BITS else int(code[-1])
        size = 0 if group == "row" else int(group[1:])
        static = inputs == "/x8static"
        return cls(kind, bits, size, scale, bool(zeros), bool(ordered), 8 if inputs else 0, static)

    @property
    def zero_dtype(self) -> torch.dtype | None:
        """The dtype of zeros or offsets; None where there are none."""
        return torch.float32 if self.code == "affine" else torch.uint8 if self.zeros else None

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    def num_groups(self, inputs: int) -> int:
        """Groups of ``inputs`` inputs; the last one may be short."""
        return -(-inputs // self.group_size) if self.group_size else 1


def values_of(codes: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """What codes stand for, before zeros and scales.

    Args:
        codes: uint8 ``[..., in / per_byte]``, of two in a byte the first in the low half.
        form: their format.

    Returns:
        float32 ``[..., in]``, newly made; of ``"int"`` and ``"affine"`` the unsigned numbers.
    """
    if form.code == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if form.bits == 8:
        return codes.float()
    numbers = unpacked_pairs(codes)
    if form.code == "e2m1":
        table = torch.tensor((*E2M1, *(-x for x in E2M1)))
        return table.index_select(0, numbers.reshape(-1).int()).view(numbers.shape)
    return numbers.float()


def unpacked_pairs(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of 4 bits, uint8 ``[..., 2 N]``, of bytes ``[..., N]`` that hold two, the first in the low half."""
    wide = codes.to(torch.int16)
    return (wide & 15 | wide >> 4 << 8).view(torch.uint8)
