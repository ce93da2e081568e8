"""GPTQ, and AutoRound in its form: codes packed along inputs, zeros along outputs, a group for each input."""

from __future__ import annotations

import torch

from ...runtime.ops.weight_format import WeightFormat
from .parts import BadTensor, Quantized, pack_pairs, scale_name, unpack

LEAVES = frozenset(("qweight", "qzeros", "scales", "g_idx"))
_BITS = (2, 3, 4, 8)


def read_gptq(module: Quantized) -> dict[str, torch.Tensor]:
    """The weight of ``qweight`` int32 ``[in * bits / 32, out]``, ``qzeros`` int32 ``[groups, out * bits / 32]``,
    ``scales`` ``[groups, out]`` and ``g_idx`` int32 ``[in]``.

    Raises:
        BadTensor: a tensor is missing or does not fit.
    """
    words, scales = module.take("qweight", torch.int32, dim=2), module.scales("scales")
    groups, outputs = scales.shape
    bits = _bits(module)
    inputs = words.shape[0] * 32 // bits
    if words.shape[1] != outputs:
        raise module.bad("qweight", f"scales are for {outputs} outputs")
    codes = unpack(words.T, bits, inputs)
    zeros = _zeros(module, bits, groups, outputs)
    order, size = _order(module, inputs, groups)
    if order is not None:
        codes = codes[:, order.long()]
    held = 8 if bits == 8 else 4
    if held == 4:
        codes = pack_pairs(codes)
    same = None if bool((zeros == 1 << (held - 1)).all()) else zeros.T.contiguous()
    form = WeightFormat("int", held, size, scale_name(scales.dtype), same is not None, order is not None)
    weight = module.stored(form, codes.contiguous(), scales.T.contiguous(), same, order)
    return {f"{module.name}.weight": weight, **module.rest}


def _bits(module: Quantized) -> int:
    bits = module.settings.get("bits", 4)
    words, zeros = module.tensors["qweight"], module.take("qzeros", torch.int32, dim=2)
    outputs = module.tensors["scales"].shape[1]
    # A config may override the bits of single modules; the zeros of a group say how many they are.
    found = [b for b in _BITS if -(-outputs * b // 32) == zeros.shape[1]]
    if bits not in found and len(found) == 1:
        bits = found[0]
    if bits not in _BITS or bits not in found or words.shape[0] * 32 % bits:
        raise module.bad("qzeros", f"{outputs} outputs at bits={bits!r} need {-(-outputs * int(bits) // 32)} columns")
    return int(bits)


def _zeros(module: Quantized, bits: int, groups: int, outputs: int) -> torch.Tensor:
    """uint8 ``[groups, outputs]``: the codes that stand for zero. Files of the first version hold one less."""
    words = module.take("qzeros", torch.int32, dim=2)
    if words.shape[0] != groups:
        raise module.bad("qzeros", f"scales are for {groups} groups")
    version = str(module.settings.get("checkpoint_format") or "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise BadTensor(f"its config has checkpoint_format={version!r}; 'gptq' and 'gptq_v2' are read")
    return unpack(words, bits, outputs) + (version == "gptq")


def _order(module: Quantized, inputs: int, groups: int) -> tuple[torch.Tensor | None, int]:
    """The columns in the order of their groups, None where they are, and the inputs in a group."""
    size = 0 if groups == 1 else -(-inputs // groups)
    stated = module.settings.get("group_size")
    if groups > 1 and isinstance(stated, int) and stated > 0 and -(-inputs // stated) == groups:
        size = stated
    if "g_idx" not in module.tensors:
        return None, size
    group = module.take("g_idx", torch.int32, dim=1)
    even = torch.arange(inputs) // (size or inputs)
    if group.shape != even.shape or not torch.equal(group.sort().values.long(), even):
        raise module.bad("g_idx", f"it does not share {inputs} inputs out to {groups} groups of {size or inputs}")
    if torch.equal(group.long(), even):
        return None, size
    return group.argsort(stable=True).to(torch.int32), size
