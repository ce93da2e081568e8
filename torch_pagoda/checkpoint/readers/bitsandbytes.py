"""Reads bitsandbytes: nf4 and fp4 in blocks, whose scales may be codes themselves, and the int8 rows of LLM.int8.

Weights are unpacked to the results of the package's own dequantization (its functional.py, ``dequantize_4bit`` and
``int8_vectorwise_dequant``; tables of its csrc/kernels.cu).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .parts import Quantized

LEAVES = re.compile(
    r"(nested_)?absmax|(nested_)?quant_map|quant_state\.bitsandbytes__\w+|SCB|weight_format", re.ASCII
)
_ON_WEIGHT = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = "quant_state.bitsandbytes__"

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution (QLoRA, appendix E)."""
_FP4_SIZES = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_TABLES = {"nf4": _NF4, "fp4": (*_FP4_SIZES, *(-size for size in _FP4_SIZES))}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PER_127 = 7.874015748031496e-3
_LARGEST = torch.finfo(torch.float32).max
_AT_ONCE = 1 << 22
"""Numbers unpacked at once."""


def read_bitsandbytes(module: Quantized) -> dict[str, torch.Tensor]:
    """Return a module's weight as floats, rounded to the dtype it was quantized from, then to the model's.

    Raises:
        BadTensor: a tensor is missing, has a wrong shape, or contradicts the config.
    """
    on_weight = {leaf: f"{module.name}.weight.{leaf}" for leaf in (*_ON_WEIGHT, *module.tensors)}
    plainly = ("weight", "bias", "SCB", "weight_format")
    module = replace(module, keys={leaf: key for leaf, key in on_weight.items() if leaf not in plainly})
    states = [leaf for leaf in module.tensors if leaf.startswith(_STATE)]
    if len(states) > 1:
        raise module.bad(states[1], f"unexpected in addition to {states[0]!r}; download the checkpoint again")
    if states:
        weight = _of_4_bits(module, states[0])
    elif "SCB" in module.tensors:
        weight = _of_8_bits(module)
    else:
        leaf = next(leaf for leaf in module.tensors if LEAVES.fullmatch(leaf))
        raise module.bad(leaf, "quant_state and SCB are missing; download the checkpoint again")
    return {f"{module.name}.weight": weight.to(module.dtype), **module.rest}


def _of_8_bits(module: Quantized) -> torch.Tensor:
    """Unpack ``weight`` int8 ``[out, in]`` in steps of ``SCB / 127``, float32 ``[out]``."""
    weight, sizes = module.take("weight", torch.int8, dim=2), module.take("SCB", torch.float32, dim=1)
    _check_stated(module, "SCB", 8)
    if len(sizes) != len(weight):
        raise module.bad("SCB", f"expected {len(weight)} outputs")
    _check_sizes(module, "SCB", sizes)
    layout = module.take("weight_format") if "weight_format" in module.tensors else torch.zeros(1)
    if layout.numel() != 1 or bool((layout != 0).any()):
        raise module.bad("weight_format", "only 0 (rows) is supported; save it again with a newer bitsandbytes")
    dense = torch.empty(weight.shape, dtype=module.dtype)
    rows = max(1, _AT_ONCE // max(weight.shape[1], 1))
    for first in range(0, len(weight), rows):
        some = slice(first, first + rows)
        dense[some] = weight[some] * sizes[some, None] * _PER_127
        _check_weights(module, "SCB", dense[some])
    return dense


def _of_4_bits(module: Quantized, leaf: str) -> torch.Tensor:
    """Unpack ``weight``, bytes of two codes with the first in the high half, in blocks of the flattened matrix."""
    kind, state = leaf.removeprefix(_STATE), _state(module, leaf)
    if kind not in _TABLES or state.get("quant_type") != kind:
        raise module.bad(leaf, f"it says quant_type={state.get('quant_type')!r}; supported: {', '.join(_TABLES)}")
    _check_stated(module, leaf, 4, kind)
    shape: Any = state.get("shape")
    block: Any = state.get("blocksize")
    dtype = _DTYPES.get(str(state.get("dtype")))
    if not _is_shape(shape) or dtype is None or not _is_block(block):
        said = {key: state.get(key) for key in ("shape", "blocksize", "dtype")}
        raise module.bad(leaf, f"it says {said}; expected a float matrix in blocks of a power of two")
    outputs, inputs = shape
    count = outputs * inputs
    codes = module.take("weight").contiguous().view(-1).view(torch.uint8)
    if codes.numel() != -(-count // 2):
        raise module.bad("weight", f"expected {-(-count // 2)} bytes for {outputs} × {inputs} codes of 4 bits")
    table = torch.tensor(_TABLES[kind], dtype=torch.float32)
    stated = module.take("quant_map", torch.float32, dim=1)
    if stated.shape != table.shape or not bool(((stated - table).abs() <= 1e-6).all()):
        raise module.bad("quant_map", f"it is not the table of {kind}; the file is broken, download it again")
    scales = _scales(module, state, leaf, -(-count // block))
    both = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # of each byte the high and low half
    dense = torch.empty(2 * codes.numel(), dtype=dtype)
    at_once = max(_AT_ONCE // block, 1) * block
    for first in range(0, dense.numel(), at_once):
        numbers = both.index_select(0, codes[first // 2 : (first + at_once) // 2].int()).flatten()
        own = scales[first // block : (first + at_once) // block].repeat_interleave(block)[: numbers.numel()]
        dense[first : first + at_once] = numbers[: own.numel()] * own
        _check_weights(module, "absmax", dense[first : first + at_once])
    return dense[:count].view(outputs, inputs)


def _scales(module: Quantized, state: Mapping[str, Any], leaf: str, blocks: int) -> torch.Tensor:
    """Return the scale of each block, float32: ``absmax``, or if that is bytes, ``nested_quant_map[absmax]`` times
    the ``nested_absmax`` of its block of scales, plus the offset subtracted before they were quantized."""
    nested = "nested_absmax" in module.tensors
    if nested is not (state.get("nested_blocksize") is not None):
        raise module.bad(leaf, f"it says nested_blocksize={state.get('nested_blocksize')}, but the tensors do not")
    absmax = module.take("absmax", torch.uint8 if nested else torch.float32, dim=1)
    if len(absmax) != blocks:
        raise module.bad("absmax", f"expected {blocks} blocks")
    if not nested:
        _check_sizes(module, "absmax", absmax)
        return absmax
    block: Any = state["nested_blocksize"]
    offset: Any = state.get("nested_offset")
    is_float = isinstance(offset, int | float) and not isinstance(offset, bool) and abs(offset) < _LARGEST
    if not _is_block(block) or not is_float:
        raise module.bad(leaf, f"it says nested_blocksize={block}, nested_offset={offset}; download the file again")
    if state.get("nested_dtype") != "float32":
        raise module.bad(leaf, f"it says nested_dtype={state.get('nested_dtype')!r}; only 'float32' is supported")
    sizes = module.take("nested_absmax", torch.float32, dim=1)
    table = module.take("nested_quant_map", torch.float32, dim=1)
    if len(sizes) != -(-blocks // block) or len(table) != 256:
        at = "nested_absmax" if len(table) == 256 else "nested_quant_map"
        raise module.bad(at, f"expected {-(-blocks // block)} blocks of {block} and a table of 256")
    for name, found in (("nested_absmax", sizes), ("nested_quant_map", table)):
        _check_sizes(module, name, found, signed=name == "nested_quant_map")
    own = sizes.repeat_interleave(block)[:blocks]
    return table[absmax.long()] * own + torch.tensor(float(offset), dtype=torch.float32)


def _state(module: Quantized, leaf: str) -> Mapping[str, Any]:
    """Return the JSON in the bytes of a tensor."""
    data = module.take(leaf, torch.uint8, dim=1)
    try:
        found = json.loads(bytes(data.tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise module.bad(leaf, f"it is not JSON: {error}; the file is broken, download it again") from error
    if not isinstance(found, dict):
        raise module.bad(leaf, "it is not a JSON object; the file is broken, download it again")
    return found


def _check_sizes(module: Quantized, leaf: str, sizes: torch.Tensor, *, signed: bool = False) -> None:
    """Reject NaN, infinite and negative scales; 0 is the scale of zeros."""
    if not bool(sizes.isfinite().all()) or (not signed and bool((sizes < 0).any())):
        raise module.bad(leaf, "a number in it is NaN, infinite or negative; the file is broken, download it again")


def _check_weights(module: Quantized, leaf: str, weights: torch.Tensor) -> None:
    """Reject products beyond the range of their dtype."""
    if not bool(weights.isfinite().all()):
        raise module.bad(leaf, f"it makes weights overflow {weights.dtype}; the file is broken, download it again")


def _check_stated(module: Quantized, leaf: str, bits: int, kind: str = "") -> None:
    settings = module.settings
    stated = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else bits
    if stated != bits:
        raise module.bad(leaf, f"it has {bits} bits, but its config states {stated}")
    if kind and settings.get("bnb_4bit_quant_type", kind) != kind:
        raise module.bad(leaf, f"it is {kind}, but its config states {settings['bnb_4bit_quant_type']!r}")


def _is_shape(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(type(size) is int and size > 0 for size in found)


def _is_block(found: Any) -> bool:
    return type(found) is int and 2 <= found <= 1 << 16 and found & (found - 1) == 0
