"""Reads compressed-tensors: packed integers, bytes with scales, floats of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...runtime.ops.linear.weight_format import InputScale, WeightFormat
from .module_settings import pattern_of
from .parts import BadTensor, Quantized, group_of, is_expert, pack_pairs, powers_of_two, scale_name, unpack

_OF_WEIGHTS = frozenset(
    (
        *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        "weight_global_scale",
    )
)
_OF_INPUTS = frozenset(("input_scale", "input_zero_point", "input_global_scale"))
_OF_OUTPUTS = frozenset(("output_scale", "output_zero_point", "k_scale", "v_scale"))
LEAVES = _OF_WEIGHTS | _OF_INPUTS | _OF_OUTPUTS
"""Ignored tensors: scales of outputs and of a cache, and scales of inputs of float and packed weights. All of these
values keep the model's own dtype."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check the config's settings about the weights as a whole.

    Raises:
        BadTensor: the weights are rotated, sparse, or not compressed.
    """
    if settings.get("transform_config"):
        raise BadTensor("its config has a transform_config; rotated weights are not supported")
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise BadTensor(f"its config has sparsity_config.format={sparse!r}; only 'dense' is supported")
    status = settings.get("quantization_status", "compressed")
    if status != "compressed":
        raise BadTensor(f"its config has quantization_status={status!r}; only 'compressed' is supported")


def read_compressed(module: Quantized) -> dict[str, torch.Tensor]:
    """Return the weight of a module in any of the library's formats.

    Raises:
        BadTensor: a tensor is missing, has a wrong shape, or contradicts the config.
    """
    tensors = module.tensors
    module.ignore(*_OF_OUTPUTS)
    if "weight_packed" in tensors:
        module.ignore(*_OF_INPUTS)
        packed = module.take("weight_packed", torch.int32, torch.uint8, dim=2)
        weight = _packed(module) if packed.dtype is torch.int32 else _floats_of_4_bits(module)
    elif "weight" in tensors and tensors["weight"].dtype is torch.int8:
        weight = _bytes(module)
    elif "weight" in tensors and tensors["weight"].dtype is torch.float8_e4m3fn:
        module.ignore(*_OF_INPUTS)
        weight = _floats_of_8_bits(module)
    elif not (of_codes := sorted(tensors.keys() & _OF_WEIGHTS)):
        module.ignore(*_OF_INPUTS)
        return {f"{module.name}.{leaf}": module.take(leaf) for leaf in tensors if leaf not in LEAVES}
    elif "weight" in tensors:
        raise module.bad("weight", f"expected int8 or float8_e4m3fn with a {of_codes[0]}")
    else:
        module.take("weight_packed")
        raise AssertionError
    return {f"{module.name}.weight": weight, **module.rest}


def _packed(module: Quantized) -> torch.Tensor:
    """Read ``weight_packed`` int32 ``[out, in * bits / 32]``, zeros int32 ``[out * bits / 32, groups]``."""
    words, scales = module.take("weight_packed", torch.int32, dim=2), module.scales("weight_scale")
    shape = module.take("weight_shape", torch.int64, torch.int32, dim=1).tolist()
    if len(shape) != 2 or shape[0] != words.shape[0] or shape[1] <= 0:
        raise module.bad("weight_shape", f"it says {shape}, but weight_packed has {words.shape[0]} rows")
    outputs, inputs = shape
    stated = {entry.get("num_bits") for entry in _weights(module.settings)}
    if other := sorted(stated - {None, 4, 8}, key=str):
        raise module.bad("weight_packed", f"its config states {other} bits; only 4 and 8 are supported")
    bits = next((b for b in (4, 8) if -(-inputs * b // 32) == words.shape[1]), 0)
    if not bits:
        raise module.bad("weight_packed", f"expected {inputs} inputs of 4 or 8 bits")
    if scales.shape[0] != outputs:
        raise module.bad("weight_scale", f"expected {outputs} outputs")
    groups = scales.shape[1]
    size = group_of(module, inputs, groups)
    _check_stated(module, bits, inputs, size, "weight_packed")
    stream = words.contiguous().view(torch.uint8)
    if bits == 4 and inputs % 2:
        raise module.bad("weight_packed", "expected an even number of inputs")
    codes = stream[:, : inputs * bits // 8]
    zeros = None
    if "weight_zero_point" in module.tensors:
        packed = module.take("weight_zero_point", torch.int32, dim=2)
        if list(packed.shape) != [-(-outputs * bits // 32), groups]:
            raise module.bad("weight_zero_point", f"expected [{-(-outputs * bits // 32)}, {groups}]")
        zeros = unpack(packed.T, bits, outputs).T.contiguous()
    order = None
    if "weight_g_idx" in module.tensors:
        group = module.take("weight_g_idx", torch.int32, torch.int64, dim=1)
        even = torch.arange(inputs) // (size or inputs)
        if group.shape != even.shape or not torch.equal(group.sort().values.long(), even):
            raise module.bad("weight_g_idx", f"it does not distribute {inputs} inputs evenly to {groups} groups")
        if not torch.equal(group.long(), even):
            order = group.argsort(stable=True).to(torch.int32)
            numbers = unpack(words, bits, inputs)[:, order.long()]
            codes = pack_pairs(numbers) if bits == 4 else numbers.contiguous()
    form = WeightFormat("int", bits, size, scale_name(scales.dtype), zeros is not None, order is not None)
    return module.stored(form, codes, scales, zeros, order)


def _bytes(module: Quantized) -> torch.Tensor:
    """Read ``weight`` int8 ``[out, in]`` with a scale for each output or group."""
    weight, scales = module.take("weight", torch.int8, dim=2), module.scales("weight_scale", dim=None)
    outputs, inputs = weight.shape
    scales = _of_outputs(scales, outputs)
    if scales.dim() != 2 or scales.shape[0] != outputs:
        raise module.bad("weight_scale", f"expected one scale, or scales for each of {outputs} outputs")
    zeros = None
    if "weight_zero_point" in module.tensors:
        points = _of_outputs(module.take("weight_zero_point", torch.int8), outputs)
        if points.shape != scales.shape:
            raise module.bad("weight_zero_point", f"expected {list(scales.shape)}")
        zeros = unsigned(points)
    size = group_of(module, inputs, scales.shape[1])
    _check_stated(module, 8, inputs, size, "weight")
    given = _static_inputs(module, size)
    input_bits = 8 if given or rounds_rows(module.settings) else 0
    form = WeightFormat(
        "int", 8, size, scale_name(scales.dtype), zeros is not None, False, input_bits, given is not None
    )
    return module.stored(form, unsigned(weight), scales, zeros, input_scale=given)


def _static_inputs(module: Quantized, size: int) -> InputScale | None:
    """Return the static scale of the inputs of int8 weights, if the config has one; None for weights in groups and
    for experts, whose inputs keep 16 bits.

    Raises:
        BadTensor: a tensor is missing, has a wrong shape, or the config does not explain it.
    """
    stated = _inputs(module.settings)
    entries = [entry for entry in stated if is_static(entry)]
    if "input_scale" not in module.tensors:
        if "input_zero_point" in module.tensors:
            raise module.bad("input_zero_point", "input_scale is missing; download the checkpoint again")
        if entries and len(entries) == len(stated):
            module.take("input_scale")
        return None
    if not entries:
        kinds = [_kind_of_inputs(entry) for entry in stated]
        raise module.bad(
            "input_scale", f"its config states inputs {kinds or 'of the model'}, not static ones of 8 bits"
        )
    given = module.input_scale("input_zero_point")
    if given.offset and all(entry.get("symmetric", True) is True for entry in entries):
        raise module.bad("input_zero_point", f"it is {given.offset}, but its config states symmetric inputs")
    if "input_zero_point" not in module.tensors and not any(entry.get("symmetric", True) for entry in entries):
        module.take("input_zero_point")
    return None if size or is_expert(module.name) else given


def _of_outputs(table: torch.Tensor, outputs: int) -> torch.Tensor:
    """Expand one number for all outputs to one for each, ``[out, 1]``; return other tables unchanged."""
    return table.reshape(1, 1).expand(outputs, 1).contiguous() if table.numel() == 1 else table


def _floats_of_8_bits(module: Quantized) -> torch.Tensor:
    """Read ``weight`` e4m3 ``[out, in]`` with one scale, one per output, or one per block of both; or powers of two
    for groups (MXFP8)."""
    weight = module.take("weight", torch.float8_e4m3fn, dim=2)
    _check_no_offsets(module)
    if "weight_scale" in module.tensors and module.tensors["weight_scale"].dtype is torch.uint8:
        powers = powers_of_two(module.take("weight_scale", torch.uint8, dim=2))
        module.check_scales("weight_scale", powers)
        _check_numbers(module, weight)
        size = group_of(module, weight.shape[1], powers.shape[1])
        form = WeightFormat("e4m3", 8, size, scale_name(powers.dtype))
        return module.stored(form, weight.view(torch.uint8), powers)
    scales = module.scales("weight_scale", dim=None)
    structure = next((entry.get("block_structure") for entry in _weights(module.settings)), None)
    return in_blocks(module, weight, scales, "weight_scale", structure)


def _floats_of_4_bits(module: Quantized) -> torch.Tensor:
    """Read ``weight_packed`` uint8 ``[out, in / 2]`` of e2m1 with scales for 16 (NVFP4) or 32 inputs (MXFP4)."""
    _check_no_offsets(module)
    module.ignore("weight_shape")
    codes = module.take("weight_packed", torch.uint8, dim=2)
    if "weight_global_scale" in module.tensors:
        narrow = module.take("weight_scale", torch.float8_e4m3fn, dim=2)
        whole = module.take("weight_global_scale", torch.float32)
        if whole.numel() != 1:
            raise module.bad("weight_global_scale", "expected one number")
        module.check_scales("weight_global_scale", whole)
        scales = narrow.float() / whole.reshape(())
    else:
        scales = powers_of_two(module.take("weight_scale", torch.uint8, dim=2))
    module.check_scales("weight_scale", scales)
    size = group_of(module, codes.shape[1] * 2, scales.shape[1])
    return module.stored(WeightFormat("e2m1", 4, size, scale_name(scales.dtype)), codes, scales)


def _check_no_offsets(module: Quantized) -> None:
    """Reject floats with a zero point other than 0."""
    if "weight_zero_point" in module.tensors and bool((module.take("weight_zero_point").float() != 0).any()):
        raise module.bad("weight_zero_point", "floats have no zero point other than 0; download the checkpoint again")


def unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """Convert signed bytes to unsigned ones around 128."""
    return numbers.view(torch.uint8) ^ 128


def in_blocks(
    module: Quantized, weight: torch.Tensor, scales: torch.Tensor, leaf: str, block: Any = None
) -> torch.Tensor:
    """Return an e4m3 weight with one scale, one per output, or one per block of outputs and inputs.

    Args:
        module: module of the weight.
        weight: float8_e4m3fn ``[out, in]``.
        scales: one number, ``[out]``, ``[out, 1]``, or a grid.
        leaf: last name part of the scales.
        block: sizes of the grid's blocks stated in the config.

    Raises:
        BadTensor: the grid does not cover the weight.
    """
    outputs, inputs = weight.shape
    _check_numbers(module, weight)
    name, codes = scale_name(scales.dtype), weight.view(torch.uint8)
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(outputs, 1).contiguous()
    elif scales.numel() == outputs and scales.dim() < 3 and (scales.dim() == 1 or scales.shape[1] == 1):
        scales = scales.reshape(outputs, 1)
    elif scales.dim() == 2:
        high, wide = block if isinstance(block, list | tuple) and len(block) == 2 else (128, 128)
        if list(scales.shape) != [-(-outputs // high), -(-inputs // wide)]:
            raise module.bad(leaf, f"expected blocks of {high} × {wide} of [{outputs}, {inputs}]")
        rows = scales.repeat_interleave(high, 0)[:outputs].contiguous()
        return module.stored(WeightFormat("e4m3", 8, wide, name), codes, rows)
    else:
        raise module.bad(leaf, f"expected one scale, {outputs} scales or a grid")
    return module.stored(WeightFormat("e4m3", 8, 0, name), codes, scales)


def _check_numbers(module: Quantized, weight: torch.Tensor) -> None:
    if bool(weight.view(torch.uint8).bitwise_and(127).eq(127).any()):
        raise module.bad("weight", "it contains NaN; the file is broken, download it again")


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def _weights(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    stated = [group.get("weights") for group in _groups(settings)]
    return [entry for entry in stated if isinstance(entry, Mapping)]


def group_of_module(settings: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the group of the config that quantizes the weight of a linear layer; None if there is none, or the layer
    is ignored.

    Args:
        settings: the config's settings.
        name: name of the layer's module.
    """
    if _names(settings, "ignore", name):
        return None
    quantizing = (group for group in _groups(settings) if isinstance(group.get("weights"), Mapping))
    return next((group for group in quantizing if _names(group, "targets", name, "Linear")), None)


def _names(stated: Mapping[str, Any], entry: str, *names: str) -> bool:
    """Return True if a list in a config has one of these names, or a pattern (``re:``) that one begins with.

    Raises:
        BadTensor: a pattern is not a regular expression.
    """
    listed = stated.get(entry)
    for text in map(str, listed if isinstance(listed, list) else ()):
        if text.startswith("re:"):
            if any(map(pattern_of(entry, text[3:]).match, names)):
                return True
        elif text in names:
            return True
    return False


def rounds_rows(settings: Mapping[str, Any]) -> bool:
    """Return True if all groups of the config request inputs of 8 bits with a dynamic scale for each row."""
    inputs = _inputs(settings)
    return bool(inputs) and all(
        isinstance(entry, Mapping)
        and (entry.get("num_bits"), entry.get("type"), entry.get("strategy")) == (8, "int", "token")
        and entry.get("dynamic") is True
        and entry.get("symmetric", True) is True
        for entry in inputs
    )


def is_static(entry: Any) -> bool:
    """Return True if 8-bit inputs share one static scale."""
    stated = isinstance(entry, Mapping) and (entry.get("num_bits"), entry.get("type"), entry.get("strategy"))
    return stated == (8, "int", "tensor") and not entry.get("dynamic")


def _kind_of_inputs(entry: Any) -> Any:
    kinds = ("num_bits", "type", "strategy", "dynamic")
    return tuple(entry.get(kind) for kind in kinds) if isinstance(entry, Mapping) else entry


def _inputs(settings: Mapping[str, Any]) -> list[Any]:
    """Return the input settings of each group of the config."""
    return [group.get("input_activations") for group in _groups(settings)]


def _check_stated(module: Quantized, bits: int, inputs: int, size: int, leaf: str) -> None:
    """Reject codes that no group of the config describes, and codes that lack what all groups of their bits require.

    Args:
        module: module of the codes.
        bits: bits of a code.
        inputs: number of inputs of the weight.
        size: number of inputs that share a scale, 0 for all.
        leaf: last name part of the codes.
    """
    stated = _weights(module.settings)
    own = [entry for entry in stated if entry.get("num_bits") == bits]
    if stated and not any(_has_groups(entry, inputs, size) for entry in own):
        kinds = [(entry.get("num_bits"), entry.get("group_size")) for entry in stated]
        raise module.bad(leaf, f"it has {bits} bits in groups of {size or 'all'}, but its config states {kinds}")
    if own and all(entry.get("symmetric", True) is False for entry in own):
        module.take("weight_zero_point")
    if own and size and all(entry.get("actorder") in ("group", "dynamic", True) for entry in own):
        module.take("weight_g_idx")


def _has_groups(entry: Mapping[str, Any], inputs: int, size: int) -> bool:
    """Return True if that many inputs share a scale according to a group of the config."""
    stated = entry.get("group_size")
    if stated in (None, 0, -1):
        return size == 0
    return isinstance(stated, int) and (size or inputs) == min(stated, inputs)
