"""Reads AWQ's GEMM form, and AutoRound in that form: codes and zeros packed along outputs, in a special order."""

from __future__ import annotations

import torch

from ...runtime.ops.linear.weight_format import SCALE_DTYPES, WeightFormat
from .module_settings import one_of
from .parts import BadTensor, Layout, Quantized, group_of, pack_pairs, scale_name, unpack

LEAVES = frozenset(("qweight", "qzeros", "scales"))
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position of each of eight outputs in its word."""


def read_awq(module: Quantized) -> dict[str, torch.Tensor]:
    """Return the weight of ``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]`` and ``scales``
    ``[groups, out]``.

    Raises:
        BadTensor: a tensor is missing, has a wrong shape or contradicts the config, or it is another form of AWQ.
    """
    _, inputs, size = _sizes(module)
    zeros = _unpacked(module.take("qzeros"))
    scales = module.held_of(module.take("scales"), size or inputs)
    module.check_scales("scales", scales)
    codes = _unpacked(module.held_of(module.take("qweight"), 1, 8)).T.contiguous()
    same = None if bool((zeros == 8).all()) else module.held_of(zeros, size or inputs).T.contiguous()
    form = WeightFormat("int", 4, size, scale_name(scales.dtype), same is not None)
    weight = module.stored(form, pack_pairs(codes), scales.T.contiguous(), same)
    return {f"{module.name}.weight": weight, **module.rest}


def layout_of_awq(module: Quantized) -> Layout:
    """Return the sizes of the weight, eight of whose outputs lie in a word.

    Raises:
        BadTensor: as ``read_awq``.
    """
    outputs, inputs, size = _sizes(module)
    return Layout(outputs, inputs, 8, size or 2)


def _sizes(module: Quantized) -> tuple[int, int, int]:
    """Return outputs, inputs and inputs in a group; 0: all."""
    version = one_of(module.settings, "version", "format", "checkpoint_format", default="gemm")
    bits = module.settings.get("bits", module.settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise BadTensor(f"its config has version={version!r} and bits={bits!r}; only 'gemm' at 4 bits is supported")
    words, packed_zeros = module.take("qweight", torch.int32, dim=2), module.take("qzeros", torch.int32, dim=2)
    groups, outputs = module.take("scales", *SCALE_DTYPES.values(), dim=2).shape
    if words.shape[1] * 8 != outputs:
        raise module.bad("qweight", f"scales are for {outputs} outputs")
    if list(packed_zeros.shape) != [groups, outputs // 8]:
        raise module.bad("qzeros", f"expected [{groups}, {outputs // 8}]")
    inputs = words.shape[0]
    if inputs % 2:
        raise module.bad("qweight", "expected an even number of inputs")
    return outputs, inputs, group_of(module, inputs, groups)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 ``[rows, out / 8]`` to uint8 ``[rows, out]``."""
    numbers = unpack(words, 4, words.shape[1] * 8)
    return numbers.unflatten(-1, (-1, 8))[..., _PLACES].flatten(-2)
