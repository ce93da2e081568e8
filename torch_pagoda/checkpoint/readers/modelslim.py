"""Reads msModelSlim, whose description states the storage of every tensor."""

from __future__ import annotations

import math

import torch

from ...runtime.ops.linear.weight_format import WeightFormat
from .compressed_tensors import unsigned
from .parts import BadTensor, Quantized, is_expert, pack_pairs, scale_name

LEAVES = frozenset(
    (
        *("weight_scale", "weight_offset", "input_scale", "input_offset", "quant_bias", "deq_scale"),
        *("scale_bias", "weight_scale_second", "weight_offset_second", "kv_cache_scale"),
    )
)
KINDS = frozenset(("W8A8_DYNAMIC", "W8A16", "W8A8", "W4A8_DYNAMIC"))
"""Supported kinds of weights."""

_SCALES = ("weight_scale", "weight_scale_second")
_OF_GROUPS = ("weight_scale_second", "weight_offset_second")
_SUM_ERROR = 1e-3
"""Relative rounding error that float32 may accumulate in the sum of an output's absolute numbers."""


def read_modelslim(module: Quantized) -> dict[str, torch.Tensor]:
    """Return the weight of ``weight`` int8 ``[out, in]``, or 4 bits ``[out / 2, in]``; with static inputs also its
    bias.

    Raises:
        BadTensor: a tensor is missing, has a wrong shape, or is of another kind.
    """
    if module.kind not in KINDS:
        kinds = ", ".join(sorted(KINDS))
        raise BadTensor(f"{module.name + '.weight'!r} is described as {module.kind!r}; supported: {kinds}, FLOAT")
    weight = module.take("weight", torch.int8, dim=2)
    for leaf in _OF_GROUPS:
        if leaf in module.tensors and module.kind != "W4A8_DYNAMIC":
            raise module.bad(leaf, f"groups are supported in W4A8_DYNAMIC only, not in {module.kind}")
    module.ignore("kv_cache_scale", "kv_cache_offset")
    if module.kind == "W8A8":
        return _static(module, weight)
    module.ignore("input_scale", "input_offset", "deq_scale")
    scales = module.scales("weight_scale", dim=None).reshape(-1, 1)
    _check_offsets(module)
    if module.kind == "W4A8_DYNAMIC":
        return _of_4_bits(module, weight, scales) | module.rest
    return _weight(module, weight, scales) | module.rest


def _weight(module: Quantized, weight: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    if scales.shape[0] != weight.shape[0]:
        raise BadTensor(f"{module.name!r} has scales for {scales.shape[0]} of {weight.shape[0]} outputs")
    input_bits = 8 if module.kind == "W8A8_DYNAMIC" else 0
    form = WeightFormat("int", 8, 0, scale_name(scales.dtype), input_bits=input_bits)
    return {f"{module.name}.weight": module.stored(form, unsigned(weight), scales.contiguous())}


def _of_4_bits(module: Quantized, weight: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """Read ``weight``, numbers from -8 to 7: bytes with two outputs, the first in the low half, or with one in files
    without a version. ``weight_scale_second`` multiplies the scale of an output in each group."""
    outputs, inputs = len(scales), weight.shape[1]
    if module.tensors["weight_scale"].shape not in ((outputs,), (outputs, 1)):
        raise module.bad("weight_scale", "expected one per output, two outputs to a byte; download it again")
    if not inputs or inputs % 2:
        raise module.bad("weight", "expected an even number of inputs; download the checkpoint again")
    if len(weight) == outputs:
        if bool(((weight < -8) | (weight > 7)).any()):
            raise module.bad("weight", "expected two outputs to a byte, or one from -8 to 7; download it again")
        codes = (weight + 8).view(torch.uint8)
    else:
        halves = weight.view(torch.uint8) ^ 0x88  # numbers around 8
        codes = torch.stack([halves & 15, halves >> 4], 1).flatten(0, 1)
        if len(codes) != outputs:
            raise module.bad("weight_scale", f"expected one for each of {len(codes)} outputs; download it again")
    table, size = _scales_of_groups(module, scales, inputs)
    with_sums = len(weight) != outputs or module.settings.get("version") is not None
    if with_sums or "scale_bias" in module.tensors:
        _check_sums(module, codes, table)
    form = WeightFormat("int", 4, size, scale_name(table.dtype), input_bits=8)
    return {f"{module.name}.weight": module.stored(form, pack_pairs(codes), table.contiguous())}


def _scales_of_groups(module: Quantized, scales: torch.Tensor, inputs: int) -> tuple[torch.Tensor, int]:
    """Return the scales ``[out, groups]``, and the number of inputs that share one, 0 for all.

    Raises:
        BadTensor: the groups' scales are missing, have a wrong shape, or contradict the description.
    """
    stated = module.settings.get("group_size")
    if stated is not None and type(stated) is not int:
        raise BadTensor(f"the description says group_size={stated!r}; expected an integer")
    leaf = "weight_scale_second"
    if not (stated or 0) > 0 and not any(name in module.tensors for name in _OF_GROUPS):
        return scales, 0
    second = module.scales(leaf)
    outputs, groups = second.shape
    if outputs != len(scales) or not groups or inputs % groups:
        raise module.bad(
            leaf, f"expected {len(scales)} outputs, and groups that divide {inputs} inputs; download it again"
        )
    if stated is not None and stated != inputs // groups:
        raise module.bad(leaf, f"groups of {inputs // groups}, but the description says group_size={stated}")
    _check_offsets(module, "weight_offset_second")
    table = scales.float() * second.float()
    module.check_scales(leaf, table)
    return table, inputs // groups if groups > 1 else 0


def _check_sums(module: Quantized, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Check ``scale_bias``, 8 times the sum of each output's weights in equal parts of its inputs, against the
    weights.

    Raises:
        BadTensor: it is missing or differs: the numbers are in another order, or the scales belong to others.
    """
    stated = module.take("scale_bias", torch.float32, torch.bfloat16, torch.float16, dim=2)
    (outputs, inputs), parts = codes.shape, stated.shape[1]
    if len(stated) != outputs or not parts or inputs % parts:
        raise module.bad(
            "scale_bias", f"expected {outputs} outputs, and parts that divide {inputs} inputs; download it again"
        )
    piece = math.gcd(inputs // parts, inputs // scales.shape[1])  # inputs of one part that share a scale
    numbers = (codes.to(torch.int8) - 8).unflatten(1, (-1, piece))
    unit = 8 * scales.double().repeat_interleave(inputs // scales.shape[1] // piece, 1)

    def of_parts(sums: torch.Tensor) -> torch.Tensor:
        return sums.unflatten(1, (parts, -1)).sum(-1)

    off = (stated.double() - of_parts(numbers.sum(-1, dtype=torch.int32) * unit)).abs()
    stored = [stated, *(module.tensors[leaf] for leaf in _SCALES if leaf in module.tensors)]
    error = _SUM_ERROR + max(torch.finfo(tensor.dtype).eps for tensor in stored)
    most = error * of_parts(numbers.abs().sum(-1, dtype=torch.int32).clamp_min(1) * unit.abs())
    if not bool((off <= most).all()):
        raise module.bad("scale_bias", "it is not 8 times the sum of the weights; the file is broken: download it")


def _static(module: Quantized, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Read ``(q @ W + quant_bias) * deq_scale``, ``q = round(x / input_scale + input_offset)``. A layer without a
    bias has a ``quant_bias`` that only compensates the offset. Experts' inputs keep 16 bits."""
    outputs = len(weight)
    if "bias" in module.tensors:
        raise module.bad("bias", "unexpected in addition to quant_bias")
    module.take("input_offset")
    given = module.input_scale("input_offset")
    unit = _unit(module, outputs)
    whole = module.take("quant_bias", torch.int32, dim=1).double()
    if len(whole) != outputs:
        raise module.bad("quant_bias", f"expected {outputs} outputs")
    whole += given.offset * weight.sum(1, dtype=torch.int64)
    static = not is_expert(module.name)
    form = WeightFormat("int", 8, 0, "f32", input_bits=8 * static, static_inputs=static)
    scales = (unit / given.scale).reshape(-1, 1)
    module.check_scales("deq_scale", scales)
    stored = module.stored(form, unsigned(weight), scales, input_scale=given if static else None)
    found: dict[str, torch.Tensor] = {f"{module.name}.weight": stored}
    if bool((whole.abs() > 0.5).any()):
        found[f"{module.name}.bias"] = (whole * unit.double()).to(module.dtype)
    return found


def _unit(module: Quantized, outputs: int) -> torch.Tensor:
    """Return ``deq_scale``, float32 ``[out]`` or its bits in int64, which is ``weight_scale * input_scale`` if
    ``weight_scale`` is there.

    Raises:
        BadTensor: it is missing, has a wrong shape, or contradicts them.
    """
    unit = module.take("deq_scale", torch.float32, torch.int64, dim=1)
    if len(unit) != outputs:
        raise module.bad("deq_scale", f"expected {outputs} outputs")
    if unit.dtype is torch.int64:
        if bool(((unit >> 32) != 0).any()):
            raise module.bad("deq_scale", "expected the bits of a float32 in each; download the checkpoint again")
        unit = unit.to(torch.int32).view(torch.float32)
    module.check_scales("deq_scale", unit)
    if bool((unit < 0).any()):
        raise module.bad("deq_scale", "a scale in it is negative; the file is broken, download it again")
    _check_offsets(module)
    if "weight_scale" in module.tensors:
        of_weight, step = module.scales("weight_scale", dim=None), module.scales("input_scale", dim=None)
        if of_weight.numel() != outputs:
            raise module.bad("weight_scale", f"expected {outputs} outputs")
        error = _SUM_ERROR + sum(torch.finfo(dtype).eps for dtype in (of_weight.dtype, step.dtype))
        product = of_weight.double().flatten() * step.double().flatten()
        if not bool(((unit.double() - product).abs() <= error * product.abs()).all()):
            raise module.bad("deq_scale", "it is not weight_scale times input_scale; download the file again")
    return unit


def _check_offsets(module: Quantized, leaf: str = "weight_offset") -> None:
    if leaf in module.tensors and bool((module.take(leaf) != 0).any()):
        raise module.bad(leaf, "offsets other than 0 are not supported")
