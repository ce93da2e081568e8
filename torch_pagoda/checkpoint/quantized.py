"""Finds out how a checkpoint is quantised, and refuses codes that nothing explains.

A quantised checkpoint holds codes and, beside them, what turns them into weights. Read as a float checkpoint, its
codes would be served as weights: transformers casts them to float and only lists what was left over. So whatever
says that a tensor holds codes is looked for: the config, files beside it, tensors beside a weight, and the dtype of
what is loaded. Methods that have a reader are read (``quantized_tensors``), all others are refused by name.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from .gguf.container import is_gguf
from .readers import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelslim, mxfp4
from .readers.parts import BadTensor, Read
from .stored_tensors import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    (r"deq_scale|quant_bias|weight_offset|scale_bias", "msModelSlim"),
    (r"weight_packed|weight_shape|weight_zero_point|weight_global_scale", "compressed-tensors"),
    (r"weight_scale_inv", "FP8 in blocks"),
    (r"weight_scale_2", "ModelOpt"),
    (r"absmax|quant_map|nested_absmax|quant_state\.\w+|SCB", "bitsandbytes"),
    (r"_weight_\w+|_packed_weight", "torchao"),
    (r"\w+_blocks", "MXFP4"),
    (r"weight_scale", _BY_DTYPE),
)
"""Last parts of the names of tensors that stand in for a weight or beside it, and whose they are; surest first."""


@dataclass(frozen=True)
class Method:
    """A method of quantisation that is read.

    Attributes:
        name: as its users call it.
        read: its reader.
        is_companion: tells by the last part of a tensor's name that it belongs to a quantised weight.
        settings: what the config says of it.
        evidence: what says that the checkpoint is quantised.
        kinds: name of a tensor → how it is stored, where a description says so; else empty.
        unpacks: its reader makes floats of the weights, whose codes nothing multiplies with.
    """

    name: str
    read: Read
    is_companion: Callable[[str], object]
    settings: Mapping[str, Any]
    evidence: str
    kinds: Mapping[str, str] = field(default_factory=dict)
    unpacks: bool = False


_READERS: dict[str, tuple[str, Read, Callable[[str], object]]] = {
    "compressed-tensors": (
        "compressed-tensors",
        compressed_tensors.read_compressed,
        compressed_tensors.LEAVES.__contains__,
    ),
    "gptq": ("GPTQ", gptq.read_gptq, gptq.LEAVES.__contains__),
    "awq": ("AWQ", awq.read_awq, awq.LEAVES.__contains__),
    "auto-round": ("AutoRound", gptq.read_gptq, gptq.LEAVES.__contains__),
    "fp8": ("FP8", fp8.read_fp8, fp8.LEAVES.__contains__),
    "mxfp4": ("MXFP4", mxfp4.read_mxfp4, mxfp4.LEAVES.fullmatch),
    "bitsandbytes": ("bitsandbytes", bitsandbytes.read_bitsandbytes, bitsandbytes.LEAVES.fullmatch),
    "ascend": ("msModelSlim", modelslim.read_modelslim, modelslim.LEAVES.__contains__),
}
_SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Of old checkpoints whose config says nothing."""
DESCRIPTIONS = tuple(pattern for pattern, _ in _DESCRIPTIONS)
"""Patterns of the names of files that say how the weights beside them are quantised."""
_LARGEST_DESCRIPTION = 64 << 20


def quantization_method(config: Any, name: str) -> Method | None:
    """The method by which a checkpoint is quantised, as its config or a file beside it says.

    Args:
        config: the checkpoint's, an object of transformers or what its file holds.
        name: its folder or hub id.

    Returns:
        None where neither says anything.

    Raises:
        ValueError: there is no reader for it, or what is said cannot be read; the message names the method.
    """
    description = next(iter(sorted(Path(name).glob("quant_model_description*.json"))), None)
    if description is not None:
        return _modelslim(description, name)
    said_of_all = config if isinstance(config, Mapping) else config.to_dict()
    found = next(iter(_quantization_configs(said_of_all)), None)
    if found is not None:
        key, said = found
        method = said.get("quant_method") if isinstance(said, Mapping) else None
        if method is None and "compression_config" in key:
            method = "compressed-tensors"
        method = str(getattr(method, "value", method or "a method that it does not name"))[:100]
        if method not in _READERS or not isinstance(said, Mapping):
            raise refusal(name, _NAMES.get(method, method), f"its config has a {key}")
        return _checked(method, said, name, f"its config has a {key}")
    for file, method in _SETTINGS_FILES.items():
        if (Path(name) / file).is_file():
            return _checked(method, _read_json(Path(name) / file, name), name, f"{file} describes its weights")
    for pattern, method in _DESCRIPTIONS:
        for found_file in sorted(Path(name).glob(pattern)):
            raise refusal(name, method, f"{found_file.name} describes its weights")
    return None


def check_float(config: Any, name: str, purpose: str) -> None:
    """Refuse a quantised checkpoint where what is wanted of it is told of float ones only.

    Args:
        config: the checkpoint's.
        name: its folder or hub id.
        purpose: what is wanted.

    Raises:
        ValueError: it is quantised.
    """
    method = quantization_method(config, name)
    said = (
        "GGUF: the file begins so" if is_gguf(name) else "" if method is None else f"{method.name}: {method.evidence}"
    )
    if said:
        raise ValueError(
            f"model={name!r} is quantised ({said}), and {purpose} would be taken for "
            "floats; load it instead (pagoda inspect of a folder with weights, LLM), or pass the float checkpoint"
        )


def _checked(method: str, settings: Mapping[str, Any], name: str, evidence: str) -> Method:
    """The method, after the checks of its settings as a whole."""
    known, read, is_companion = _READERS[method]
    try:
        if method == "compressed-tensors":
            compressed_tensors.check_settings(settings)
        if method == "auto-round":
            packing = settings.get("packing_format") or settings.get("backend")
            form = str(packing).removeprefix("auto_round:")
            if form == "auto_awq":
                read, is_companion = awq.read_awq, awq.LEAVES.__contains__
            elif form != "auto_gptq":
                raise BadTensor(f"its config has packing_format={packing!r}; 'auto_gptq' and 'auto_awq' are read")
    except BadTensor as error:
        raise broken(name, known, str(error)) from error
    return Method(known, read, is_companion, settings, evidence, unpacks=method == "bitsandbytes")


def _modelslim(file: Path, name: str) -> Method:
    kinds = _read_json(file, name)
    known, read, is_companion = _READERS["ascend"]
    rotation = ((kinds.get("optional") or {}) if isinstance(kinds.get("optional"), Mapping) else {}).get("quarot")
    if rotation is not None:
        rotations = rotation.get("rotation_map") if isinstance(rotation, Mapping) else None
        if not isinstance(rotations, Mapping) or rotations.keys() != {"global_rotation"}:
            raise broken(name, known, f"{file.name} describes rotations other than one of the whole model")
    said = {key: value for key, value in kinds.items() if isinstance(value, str)}
    return Method(known, read, is_companion, kinds, f"{file.name} describes its weights", said)


def _read_json(file: Path, name: str) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > _LARGEST_DESCRIPTION:
            raise ValueError(f"it has more than {_LARGEST_DESCRIPTION} bytes")
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise ValueError(f"model={name!r}: {file.name} cannot be read: {error}; get the checkpoint again") from error
    return found


def broken(name: str, method: str, what: str) -> ValueError:
    """The error for a quantised checkpoint that a reader cannot read."""
    return ValueError(f"model={name!r} is quantised ({method}), and {what}")


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
        owner, leaf = split_name(key)
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
        if tensor.is_narrow_float or (tensor.is_whole_number and split_name(key)[1] == "weight"):
            raise refusal(name, "a method that it does not name", f"{key!r} is {tensor.dtype}")


def split_name(key: str) -> tuple[str, str]:
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


def check_orientation(made: Iterable[str], model: PreTrainedModel, name: str, method: Method) -> None:
    """Refuse weights ``[out, in]`` that a reader made for modules that hold them ``[in, out]``: of a square one the
    transpose would be served.

    Args:
        made: names of the weights.
        model: what was loaded with them.
        name: the checkpoint's folder or hub id.
        method: how it is quantised.

    Raises:
        ValueError: it names a weight.
    """
    turned = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D)}
    turned |= {key.removeprefix(f"{model.base_model_prefix}.") for key in turned}
    for key in sorted(turned.intersection(made)):
        raise refusal(name, method.name, f"{key!r} is of a Conv1D, which holds its weight the other way round")


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
