"""Refuses checkpoints whose numbers are codes.

A quantised checkpoint holds codes and, beside them, what turns them into weights. Read as a float checkpoint, its
codes would be served as weights: transformers casts them to float and only lists what was left over. So whatever
says that a tensor holds codes is looked for: the config, files beside it, tensors beside a weight, and the dtype of
what is loaded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .stored_tensors import StoredTensor

_CONFIG_KEYS = ("quantization_config", "compression_config")
_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
    "auto-round": "AutoRound",
    "ascend": "msModelSlim",
}
"""Of the methods that a config names otherwise than their users do."""

_DESCRIPTIONS = (
    ("quant_model_description*.json", "msModelSlim"),
    ("hf_quant_config*.json", "ModelOpt"),
    ("quantize_config*.json", "GPTQ"),
    ("quant_config*.json", "AWQ"),
)
"""Files beside a config that say how the weights were quantised."""

_BY_DTYPE = "compressed-tensors or msModelSlim"
"""Whose codes are bytes; FP8 where they are floats."""

_COMPANIONS = (
    (r"g_idx", "GPTQ"),
    (r"qweight|qzeros", "GPTQ or AWQ"),
    (r"deq_scale|quant_bias|weight_offset", "msModelSlim"),
    (r"weight_packed|weight_shape|weight_zero_point|weight_global_scale", "compressed-tensors"),
    (r"weight_scale_inv", "FP8 in blocks"),
    (r"weight_scale_2", "ModelOpt"),
    (r"absmax|quant_map|nested_absmax|quant_state\.\w+|SCB", "bitsandbytes"),
    (r"_weight_\w+|_packed_weight", "torchao"),
    (r"\w+_blocks", "MXFP4"),
    (r"weight_scale", _BY_DTYPE),
)
"""Last parts of the names of tensors that stand in for a weight or beside it, and whose they are; surest first."""


def check_description(config: Any, name: str) -> None:
    """Refuse what the config, or a file beside it, says is quantised.

    Args:
        config: the checkpoint's.
        name: its folder or hub id.

    Raises:
        ValueError: it names the method.
    """
    found = next(iter(_quantization_configs(config.to_dict())), None)
    if found is not None:
        key, said = found
        method = said.get("quant_method") if isinstance(said, Mapping) else None
        if method is None and "compression_config" in key:
            method = "compressed-tensors"
        method = str(getattr(method, "value", method or "a method that it does not name"))[:100]
        raise refusal(name, _NAMES.get(method, method), f"its config has a {key}")
    for pattern, method in _DESCRIPTIONS:
        for file in sorted(Path(name).glob(pattern)):
            raise refusal(name, method, f"{file.name} describes its weights")


def _quantization_configs(config: Mapping[str, Any], place: str = "") -> Iterable[tuple[str, Any]]:
    """The entries of a config and those nested in it that speak of quantised weights, with their dotted names."""
    for key, value in config.items():
        if key in _CONFIG_KEYS:
            if value is not None:
                yield place + key, value
        elif isinstance(value, Mapping):
            yield from _quantization_configs(value, f"{place}{key}.")


def check_stored(tensors: Mapping[str, StoredTensor], name: str) -> None:
    """Refuse, before anything is loaded, tensors that are codes by their names or dtypes.

    Raises:
        ValueError: it names a tensor, and the method where that shows.
    """
    places: dict[str, tuple[str, str]] = {}
    for key in tensors:
        owner, leaf = _split(key)
        places.setdefault(leaf, (owner, key))
    for pattern, method in _COMPANIONS:
        for leaf, (owner, key) in places.items():
            if not re.fullmatch(pattern, leaf):
                continue
            if method == "MXFP4" and f"{key.removesuffix('_blocks')}_scales" not in tensors:
                continue
            weight = tensors.get(f"{owner}.weight")
            is_fp8 = method == _BY_DTYPE and weight is not None and weight.is_narrow_float
            raise refusal(name, "FP8" if is_fp8 else method, f"it holds {key!r}")
    for key, tensor in tensors.items():
        if tensor.is_narrow_float or (tensor.is_whole_number and _split(key)[1] == "weight"):
            raise refusal(name, "a method that it does not name", f"{key!r} is {tensor.dtype}")


def _split(key: str) -> tuple[str, str]:
    """Owner and last part of a tensor's name; what bitsandbytes hangs onto a weight belongs to the weight's owner."""
    owner, part, leaf = key.rpartition(".weight.")
    if not part:
        owner, _, leaf = key.rpartition(".")
    return owner, leaf


def check_loaded(tensors: Mapping[str, StoredTensor], model: nn.Module, unexpected: Iterable[str], name: str) -> None:
    """Refuse, once transformers has matched names, what it cast from codes or left over beside a weight that it took.

    Args:
        tensors: those of the checkpoint.
        model: what was loaded from them.
        unexpected: names that transformers found no place for.
        name: the checkpoint's folder or hub id.

    Raises:
        ValueError: it names a tensor.
    """
    left_over = set(unexpected)
    kept = model.state_dict()
    for key in sorted(left_over):
        beside = _beside(key, kept)
        if beside:
            raise ValueError(
                f"model={name!r} holds {key!r}, and {type(model).__name__} reads {beside!r} without it, so the "
                "weights would not be the checkpoint's; if they are quantised, pass the float checkpoint that they "
                "were made from, else one of this architecture"
            )
    # Integers may be masks and tables, which the model keeps as integers too, or leaves alone.
    integers = defaultdict(list)
    for key, value in kept.items():
        if not value.is_floating_point():
            integers[key.rpartition(".")[2]].append(key)
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for key, tensor in tensors.items():
        if not tensor.is_whole_number or any(pattern.search(key) for pattern in ignored):
            continue
        is_left_over = any(key.endswith(other) or other.endswith(key) for other in left_over)
        if not is_left_over and not integers[key.rpartition(".")[2]]:
            raise refusal(name, "a method that it does not name", f"{key!r} is {tensor.dtype}")


def _beside(key: str, kept: Mapping[str, Any]) -> str:
    """The weight, of those that the model keeps, that a tensor seems to belong to; "" for none.

    It is the one that the tensor's name goes on from, or that of a module which the tensor is a part of.
    """
    for end in range(len(key) - 1, 0, -1):
        if key[end] in "._:" and key[:end] in kept:
            return key[:end]
        if key[end] == "." and f"{key[:end]}.weight" in kept:
            return f"{key[:end]}.weight"
    return ""


def refusal(name: str, method: str, evidence: str) -> ValueError:
    """The error for a quantised checkpoint: what shows it, whose method it is, and the remedy."""
    return ValueError(
        f"model={name!r} is quantised ({method}: {evidence}), which is not supported; pass the float checkpoint that "
        "it was made from, with quantization='int8' or 'int4' to have its weights rounded here"
    )
