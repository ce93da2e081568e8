"""Reads GPTQ, and AutoRound in its form: codes packed along inputs, zeros along outputs, a group index per input."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch

from ...runtime.ops.linear.weight_format import SCALE_DTYPES, WeightFormat
from .module_settings import one_of
from .parts import BadTensor, Layout, Quantized, group_of, pack_pairs, scale_name, unpack

LEAVES = frozenset(("qweight", "qzeros", "scales", "g_idx"))
_BITS = (2, 3, 4, 8)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A word of ones, by the bits of each."""
_OF_3_BITS = 7
"""First GPTQModel release that subtracts 1 from each 3-bit zero; earlier ones subtract from other bits."""
_OF_3_BITS_AGAIN = f"quantize it again with GPTQModel {_OF_3_BITS} or later, or pass the float checkpoint"


def read_gptq(module: Quantized) -> dict[str, torch.Tensor]:
    """Return the weight of ``qweight`` int32 ``[in * bits / 32, out]``, ``qzeros`` int32 ``[groups, out * bits /
    32]``, ``scales`` ``[groups, out]`` and ``g_idx`` int32 ``[in]``.

    Raises:
        BadTensor: a tensor is missing, has a wrong shape, or contradicts the config.
    """
    bits, outputs, inputs, groups = _sizes(module)
    zeros = _zeros(module, bits, groups, outputs)
    order, size = _order(module, inputs, groups)
    words = module.held_of(module.take("qweight"), Fraction(32, bits))
    scales = module.held_of(module.take("scales"), size or inputs)
    module.check_scales("scales", scales)
    codes = unpack(words.T, bits, words.shape[0] * 32 // bits)
    if order is not None:
        codes = codes[:, order.long()]
    held = 8 if bits == 8 else 4
    if held == 4:
        codes = pack_pairs(codes)
    is_middle = bool((zeros == 1 << (held - 1)).all())
    same = None if is_middle else module.held_of(zeros, size or inputs).T.contiguous()
    form = WeightFormat("int", held, size, scale_name(scales.dtype), same is not None, order is not None)
    weight = module.stored(form, codes.contiguous(), scales.T.contiguous(), same, order)
    return {f"{module.name}.weight": weight, **module.rest}


def layout_of_gptq(module: Quantized) -> Layout:
    """Return the sizes of the weight, whose inputs lie in words and groups; those in another order (act-order) are
    read together.

    Raises:
        BadTensor: as ``read_gptq``.
    """
    bits, outputs, inputs, groups = _sizes(module)
    order, size = _order(module, inputs, groups)
    per_word = Fraction(32, bits).numerator
    return Layout(outputs, inputs, 1, math.lcm(size or 1, per_word) if order is None else inputs)


def _sizes(module: Quantized) -> tuple[int, int, int, int]:
    """Return bits, outputs, inputs and groups."""
    words = module.take("qweight", torch.int32, dim=2)
    groups, outputs = module.take("scales", *SCALE_DTYPES.values(), dim=2).shape
    bits = _bits(module)
    if words.shape[1] != outputs:
        raise module.bad("qweight", f"scales are for {outputs} outputs")
    return bits, outputs, words.shape[0] * 32 // bits, groups


def _bits(module: Quantized) -> int:
    bits = module.settings.get("bits", 4)
    words, zeros = module.tensors["qweight"], module.take("qzeros", torch.int32, dim=2)
    outputs = module.tensors["scales"].shape[1]
    # A config may override the bits of single modules; the zeros of a group reveal them.
    found = [b for b in _BITS if -(-outputs * b // 32) == zeros.shape[1]]
    if bits not in found and len(found) == 1:
        bits = found[0]
    if bits not in _BITS or bits not in found or words.shape[0] * 32 % bits:
        raise module.bad("qzeros", f"{outputs} outputs at bits={bits!r} need {-(-outputs * int(bits) // 32)} columns")
    return int(bits)


def _zeros(module: Quantized, bits: int, groups: int, outputs: int) -> torch.Tensor:
    """Return the codes of zero, uint8 ``[groups, outputs]``."""
    words = module.take("qzeros", torch.int32, dim=2)
    if words.shape[0] != groups:
        raise module.bad("qzeros", f"scales are for {groups} groups")
    version = one_of(module.settings, "checkpoint_format", "format", default="gptq")
    if version not in ("gptq", "gptq_v2"):
        raise BadTensor(f"its config has checkpoint_format={version!r}; only 'gptq' and 'gptq_v2' are supported")
    symmetric = module.settings.get("sym") is True
    if version == "gptq_v2":
        zeros = unpack(words, bits, outputs)
    elif bits in _ONES:
        # 1 was subtracted from the whole word: a 0 borrowed from the numbers above it.
        zeros = unpack(words + _ONES[bits], bits, outputs)
    elif symmetric or _takes_1_off_each_of_3_bits(module.settings):
        zeros = (unpack(words, bits, outputs) + 1) & 7
    else:
        raise module.bad(
            "qzeros",
            f"zeros of 3 bits have been stored in two ways, and its config does not state which; {_OF_3_BITS_AGAIN}",
        )
    if symmetric:
        _check_symmetric(module, zeros, 1 << (bits - 1), version)
    return zeros


def _meta(settings: Mapping[str, Any], key: str) -> Any:
    """Return an entry that GPTQModel recorded when it quantized the checkpoint."""
    meta = settings.get("meta")
    return meta.get(key) if isinstance(meta, Mapping) else None


def _takes_1_off_each_of_3_bits(settings: Mapping[str, Any]) -> bool:
    """Return True if the packer of 3-bit zeros subtracted 1 from each, as AutoRound does."""
    if settings.get("quant_method") == "auto-round":
        return True
    said = _meta(settings, "quantizer")
    found = [re.match(r"gptqmodel:(\d+)\.", str(one).lower()) for one in (said if isinstance(said, list) else [said])]
    return any(match is not None and int(match[1]) >= _OF_3_BITS for match in found)


def _check_symmetric(module: Quantized, zeros: torch.Tensor, middle: int, version: str) -> None:
    """Reject zeros that are not in the middle, except in modules with too few samples, where GPTQModel's ``fallback``
    chooses its own zeros.

    Raises:
        BadTensor: the message names the version that the zeros match, if any.
    """
    low, high = int(zeros.min()), int(zeros.max())
    if low == high == middle:
        return
    other, step = ("gptq_v2", 1) if version == "gptq" else ("gptq", -1)
    if low == high == middle + step:
        remedy = f"{other!r} stores them so: set checkpoint_format={other!r} in the config if that wrote it"
    else:
        fallbacks = [_meta(module.settings, key) for key in ("fallback", "failsafe")]
        if any(isinstance(one, Mapping) and one.get("strategy") not in (None, "rtn") for one in fallbacks):
            return
        remedy = (
            _OF_3_BITS_AGAIN if middle == 4 else "download it again, or set sym=false in config if it is asymmetric"
        )
    raise module.bad(
        "qzeros", f"sym=true in its config makes every zero {middle}, but they are {low} to {high}; {remedy}"
    )


def _order(module: Quantized, inputs: int, groups: int) -> tuple[torch.Tensor | None, int]:
    """Return the columns sorted by group (None if they are) and the number of inputs in a group; 0: all.

    Raises:
        BadTensor: the inputs are unevenly distributed, or without ``g_idx`` not as the config states.
    """
    if "g_idx" not in module.tensors:
        size = group_of(module, inputs, groups)
        if groups > 1 and module.settings.get("desc_act") is True:
            module.take("g_idx")
        return None, size
    size = 0 if groups == 1 else -(-inputs // groups)
    stated = module.settings.get("group_size")
    if groups > 1 and isinstance(stated, int) and stated > 0 and -(-inputs // stated) == groups:
        size = stated
    group = module.take("g_idx", torch.int32, dim=1)
    even = torch.arange(inputs) // (size or inputs)
    if group.shape != even.shape or not torch.equal(group.sort().values.long(), even):
        raise module.bad("g_idx", f"it does not distribute {inputs} inputs to {groups} groups of {size or inputs}")
    if torch.equal(group.long(), even):
        return None, size
    return group.argsort(stable=True).to(torch.int32), size
