"""Numbers of 4 bits in int32, as Ascend's products take them: eight neighbors of the last dim in each, the first of
them in the lowest bits, in two's complement.

Source: op-plugin, doc `torch_npu-npu_convert_weight_to_int4pack.md`.
"""

from __future__ import annotations

import torch

PER_INT32 = 8
_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """What npu_convert_weight_to_int4pack makes of integers.

    Args:
        numbers: ``[..., N]`` integers from -8 to 7.

    Returns:
        ``[..., N / 8]`` int32, contiguous.

    Raises:
        ValueError: 8 does not divide N, or a number has no 4 bits.
    """
    if numbers.shape[-1] % PER_INT32:
        raise ValueError(f"numbers have shape {tuple(numbers.shape)}; the last dim must be a multiple of {PER_INT32}")
    if numbers.numel() and not -8 <= int(numbers.min()) <= int(numbers.max()) <= 7:
        raise ValueError(f"numbers lie in [{int(numbers.min())}, {int(numbers.max())}]; 4 bits hold -8 to 7")
    nibbles = numbers.to(torch.int32).unflatten(-1, (-1, PER_INT32)).bitwise_and(15)
    # Distinct bits: their sum is their union, and the highest wraps into the sign.
    return (nibbles << _SHIFTS).sum(-1, dtype=torch.int64).to(torch.int32)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """``[..., 8 N]`` int8 from -8 to 7, of ``[..., N]`` int32."""
    nibbles = (packed[..., None] >> _SHIFTS).bitwise_and(15)
    return torch.where(nibbles > 7, nibbles - 16, nibbles).to(torch.int8).flatten(-2)
