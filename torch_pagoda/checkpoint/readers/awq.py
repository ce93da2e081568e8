"""Reads AWQ's GEMM form, and AutoRound in that form: codes and zeros packed along outputs, in a special order."""

from __future__ import annotations

import torch

from ...runtime.ops.linear.weight_format import WeightFormat
from .module_settings import one_of
from .parts import BadTensor, Quantized, group_of, pack_pairs, scale_name, unpack

LEAVES = frozenset(("qweight", "qzeros", "scales"))
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position of each of eight outputs in its word."""


def read_awq(module: Quantized) -> dict[str, torch.Tensor]:
    """Return the weight of ``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]`` and ``scales``
    ``[groups, out]``.

    Raises:
        BadTensor: a tensor is missing, has a wrong shape or contradicts the config, or it is another form of AWQ.
    """
    version = one_of(module.settings, "version", "format", "checkpoint_format", default="gemm")
    bits = module.settings.get("bits", module.settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise BadTensor(f"its config has version={version!r} and bits={bits!r}; only 'gemm' at 4 bits is supported")
    words, packed_zeros = module.take("qweight", torch.int32, dim=2), module.take("qzeros", torch.int32, dim=2)
    scales = module.scales("scales")
    groups, outputs = scales.shape
    if words.shape[1] * 8 != outputs:
        raise module.bad("qweight", f"scales are for {outputs} outputs")
    if list(packed_zeros.shape) != [groups, outputs // 8]:
        raise module.bad("qzeros", f"expected [{groups}, {outputs // 8}]")
    codes, zeros = _unpacked(words).T.contiguous(), _unpacked(packed_zeros).T.contiguous()
    if codes.shape[1] % 2:
        raise module.bad("qweight", "expected an even number of inputs")
    size = group_of(module, codes.shape[1], groups)
    same = None if bool((zeros == 8).all()) else zeros
    form = WeightFormat("int", 4, size, scale_name(scales.dtype), same is not None)
    weight = module.stored(form, pack_pairs(codes), scales.T.contiguous(), same)
    return {f"{module.name}.weight": weight, **module.rest}


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 ``[rows, out / 8]`` to uint8 ``[rows, out]``."""
    numbers = unpack(words, 4, words.shape[1] * 8)
    return numbers.unflatten(-1, (-1, 8))[..., _PLACES].flatten(-2)
