"""Storage types of tensors in GGUF files, and the decoding of their blocks.

A block is a run of consecutive weights of a row. Except for plain floats, a block contains integers, and a scale and,
for some types, an offset for each group of them: ``w = number * scale - offset``. Scales of the k-quants are products
of a float and a small integer, which float32 represents exactly.

Source: https://github.com/ggml-org/ggml, src/ggml-common.h and src/ggml-quants.c (``dequantize_row_*``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...runtime.ops.linear.weight_format import WeightFormat

_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""


@dataclass(frozen=True)
class Numbers:
    """Decoded blocks.

    Attributes:
        codes: uint8 ``[blocks, weights]``: the numbers, plus 128 for 8 bits or plus 8 for 4 bits unless there are
            offsets.
        scales: ``[blocks, groups]``, float16 or float32.
        offsets: float32 ``[blocks, groups]``; None if they are 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockType:
    """A storage type of tensors.

    Attributes:
        name: name in ggml.
        weights: number of weights in a block.
        nbytes: number of bytes of a block.
        dtype: dtype of plain floats and integers; None for all other types.
        bits: bits of a decoded code, 4 or 8.
        group_size: number of weights that share a scale.
        keeps_bits: True if a code takes no fewer bits in the file.
        scale: dtype of the scales, in the spelling of ``WeightFormat``.
        has_offsets: True if each group has an offset in addition to its scale.
        take_apart: uint8 ``[blocks, nbytes]`` → ``Numbers``; None for plain and unsupported types.
    """

    name: str
    weights: int
    nbytes: int
    dtype: torch.dtype | None = None
    bits: int = 0
    group_size: int = 0
    keeps_bits: bool = False
    scale: str = "f32"
    has_offsets: bool = False
    take_apart: Callable[[torch.Tensor], Numbers] | None = None

    @property
    def form(self) -> WeightFormat | None:
        """The format of a ``StoredWeight`` with such blocks; None for floats and unsupported types."""
        if self.take_apart is None:
            return None
        return WeightFormat("affine" if self.has_offsets else "int", self.bits, self.group_size, self.scale)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 ``[blocks, 1]`` in two bytes."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(data: torch.Tensor, run: int) -> torch.Tensor:
    """Split bytes ``[blocks, N]`` to uint8 ``[blocks, 2 N]``: per run of bytes the low halves, then the high ones."""
    runs = data.unflatten(1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], 2).flatten(1)


def _pairs(data: torch.Tensor, run: int) -> torch.Tensor:
    """Split bytes likewise to numbers of 2 bits, ``[blocks, 4 N]``."""
    runs = data.unflatten(1, (-1, 1, run))
    return torch.cat([runs >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)


def _bits(data: torch.Tensor, run: int) -> torch.Tensor:
    """Split bytes likewise to single bits, ``[blocks, 8 N]``."""
    runs = data.unflatten(1, (-1, 1, run))
    return torch.cat([runs >> shift & 1 for shift in range(8)], 2).flatten(1)


def _bits_of_words(data: torch.Tensor) -> torch.Tensor:
    """Return the bits of bytes ``[blocks, N]``, the lowest first: ``[blocks, 8 N]``."""
    return torch.stack([data >> shift & 1 for shift in range(8)], -1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 4:], 16), _half(blocks, 0).float(), -_half(blocks, 2).float())


def _q5_0(blocks: torch.Tensor) -> Numbers:
    codes = _nibbles(blocks[:, 6:], 16) | _bits_of_words(blocks[:, 2:6]) << 4
    return Numbers(codes + (128 - 16), _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Numbers:
    codes = _nibbles(blocks[:, 8:], 16) | _bits_of_words(blocks[:, 4:8]) << 4
    return Numbers(codes, _half(blocks, 0).float(), -_half(blocks, 2).float())


def _q8_0(blocks: torch.Tensor) -> Numbers:
    return Numbers(blocks[:, 2:] ^ 128, _half(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> Numbers:
    both = blocks[:, :16]
    scales, offsets = _half(blocks, 80).float() * (both & 15), _half(blocks, 82).float() * (both >> 4)
    return Numbers(_pairs(blocks[:, 16:80], 32), scales, offsets)


def _q3_k(blocks: torch.Tensor) -> Numbers:
    scales = _nibbles(blocks[:, 96:104], 8) | _pairs(blocks[:, 104:108], 4) << 4
    codes = _pairs(blocks[:, 32:96], 32) | _bits(blocks[:, :32], 32) << 2
    return Numbers(codes + (128 - 4), _half(blocks, 108).float() * (scales.float() - 32))


def _scales_and_offsets(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets of the eight groups of a Q4_K or Q5_K block: 6-bit numbers in 12 bytes, times the
    floats before them."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], 1)
    offsets = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], 1)
    return _half(blocks, 0).float() * scales, _half(blocks, 2).float() * offsets


def _q4_k(blocks: torch.Tensor) -> Numbers:
    return Numbers(_nibbles(blocks[:, 16:], 32), *_scales_and_offsets(blocks))


def _q5_k(blocks: torch.Tensor) -> Numbers:
    codes = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 32) << 4
    return Numbers(codes, *_scales_and_offsets(blocks))


def _q6_k(blocks: torch.Tensor) -> Numbers:
    codes = _nibbles(blocks[:, :128], 64) | _pairs(blocks[:, 128:192], 32) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return Numbers(codes + (128 - 32), _half(blocks, 208).float() * scales)


def _levels(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of IQ4 codes plus 128."""
    table = torch.tensor([level + 128 for level in _IQ4_LEVELS], dtype=torch.uint8)
    return table[codes.int()]


def _iq4_nl(blocks: torch.Tensor) -> Numbers:
    return Numbers(_levels(_nibbles(blocks[:, 2:], 16)), _half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> Numbers:
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).flatten(1)
    high = torch.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    scales = _half(blocks, 0).float() * ((low | high << 4).float() - 32)
    return Numbers(_levels(_nibbles(blocks[:, 8:], 16)), scales)


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, torch.float32),
    1: BlockType("F16", 1, 2, torch.float16),
    2: BlockType("Q4_0", 32, 18, bits=4, group_size=32, keeps_bits=True, scale="f16", take_apart=_q4_0),
    3: BlockType("Q4_1", 32, 20, bits=4, group_size=32, keeps_bits=True, has_offsets=True, take_apart=_q4_1),
    6: BlockType("Q5_0", 32, 22, bits=8, group_size=32, scale="f16", take_apart=_q5_0),
    7: BlockType("Q5_1", 32, 24, bits=8, group_size=32, has_offsets=True, take_apart=_q5_1),
    8: BlockType("Q8_0", 32, 34, bits=8, group_size=32, keeps_bits=True, scale="f16", take_apart=_q8_0),
    9: BlockType("Q8_1", 32, 36),
    10: BlockType("Q2_K", 256, 84, bits=4, group_size=16, has_offsets=True, take_apart=_q2_k),
    11: BlockType("Q3_K", 256, 110, bits=8, group_size=16, take_apart=_q3_k),
    12: BlockType("Q4_K", 256, 144, bits=4, group_size=32, keeps_bits=True, has_offsets=True, take_apart=_q4_k),
    13: BlockType("Q5_K", 256, 176, bits=8, group_size=32, has_offsets=True, take_apart=_q5_k),
    14: BlockType("Q6_K", 256, 210, bits=8, group_size=16, take_apart=_q6_k),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18, bits=8, group_size=32, scale="f16", take_apart=_iq4_nl),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136, bits=8, group_size=32, take_apart=_iq4_xs),
    24: BlockType("I8", 1, 1, torch.int8),
    25: BlockType("I16", 1, 2, torch.int16),
    26: BlockType("I32", 1, 4, torch.int32),
    27: BlockType("I64", 1, 8, torch.int64),
    28: BlockType("F64", 1, 8, torch.float64),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
"""Types by ggml's number; unsupported ones have only a name, for the error."""

READ = tuple(kind.name for kind in BLOCK_TYPES.values() if kind.take_apart is not None)
"""Names of the supported block types."""


def packed_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes ``[blocks, N]`` for ``StoredWeight``: two 4-bit codes in a byte, the first in the low half."""
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
