"""msModelSlim, whose description says of every tensor how it is stored."""

from __future__ import annotations

import torch

from ...runtime.ops.weight_format import WeightFormat
from .compressed_tensors import unsigned
from .parts import BadTensor, Quantized, scale_name

LEAVES = frozenset(
    ("weight_scale", "weight_offset", "input_scale", "input_offset", "quant_bias", "deq_scale", "kv_cache_scale")
)
BYTES = frozenset(("W8A8_DYNAMIC", "W8A16", "W8A8"))
"""Kinds of weight that are read."""


def read_modelslim(module: Quantized) -> dict[str, torch.Tensor]:
    """The weight of ``weight`` int8 ``[out, in]``, and with static inputs its bias.

    Raises:
        BadTensor: a tensor is missing or does not fit, or it is of another kind.
    """
    if module.kind not in BYTES:
        kinds = ", ".join(sorted(BYTES))
        raise BadTensor(f"{module.name + '.weight'!r} is described as {module.kind!r}; {kinds} and FLOAT are read")
    weight = module.take("weight", torch.int8, dim=2)
    if module.kind == "W8A8":
        return _static(module, weight)
    scales = module.scales("weight_scale", dim=None).reshape(-1, 1)
    offsets = module.tensors.get("weight_offset")
    if offsets is not None and bool((offsets != 0).any()):
        raise module.bad("weight_offset", "offsets other than 0 are not read")
    return _weight(module, weight, scales) | module.rest


def _weight(module: Quantized, weight: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    if scales.shape[0] != weight.shape[0]:
        raise BadTensor(f"{module.name!r} has scales for {scales.shape[0]} outputs of {weight.shape[0]}")
    input_bits = 8 if module.kind == "W8A8_DYNAMIC" else 0
    form = WeightFormat("int", 8, 0, scale_name(scales.dtype), input_bits=input_bits)
    return {f"{module.name}.weight": module.stored(form, unsigned(weight), scales.contiguous())}


def _static(module: Quantized, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What ``(q @ W + quant_bias) * deq_scale`` says of the floats that q was rounded from: ``q = x / input_scale +
    input_offset``. A layer without a bias of its own has one in ``quant_bias`` that the offset explains."""
    unit = module.take("deq_scale")
    if unit.dtype is torch.int64:  # the bits of a float32
        unit = unit.to(torch.int32).view(torch.float32)
    step = module.scales("input_scale", dim=None).float().reshape(())
    module.check_scales("deq_scale", unit)
    found = _weight(module, weight, (unit.float() / step).reshape(-1, 1))
    offset = module.take("input_offset").double().reshape(())
    whole = module.take("quant_bias", torch.int32, dim=1).double() + offset * weight.double().sum(1)
    if "bias" in module.tensors:
        raise module.bad("bias", "beside a quant_bias, none is needed")
    if bool((whole.abs() > 0.5).any()):
        found[f"{module.name}.bias"] = (whole * unit.double()).to(module.dtype)
    return found
