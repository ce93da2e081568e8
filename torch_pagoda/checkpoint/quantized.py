"""Detects how a checkpoint is quantized, and rejects codes without a known meaning.

A quantized checkpoint stores codes and the tensors that turn them into weights. Read as a float checkpoint, its codes
would be served as weights: transformers casts them to float and only lists the leftover tensors. So everything that
reveals codes is checked: the config, files and tensors next to the weights, and the dtype of loaded tensors. Methods
with a reader are read (``quantized_tensors``); all others are rejected by name.
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
from .readers.parts import BadTensor, Layout, Quantized, Read
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
"""User-facing names of methods that configs name differently."""

_DESCRIPTIONS = (
    ("quant_model_description*.json", "msModelSlim"),
    ("hf_quant_config*.json", "ModelOpt"),
    ("quantize_config*.json", "GPTQ"),
    ("quant_config*.json", "AWQ"),
)
"""Files next to a config that describe how the weights were quantized."""

_BY_DTYPE = "compressed-tensors or msModelSlim"
"""Methods whose codes are bytes; FP8 if they are floats."""

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
"""Last name parts of tensors that replace or accompany a weight, and their methods; most reliable first."""


@dataclass(frozen=True)
class Method:
    """A supported method of quantization.

    Attributes:
        name: name that users know.
        read: its reader.
        is_companion: returns True if the last part of a tensor's name belongs to a quantized weight.
        settings: the config's settings of the method.
        evidence: reason to consider the checkpoint quantized.
        kinds: name of a tensor → its storage, if a description states it; else empty.
        unpacks: True if the reader converts weights to floats, because no kernel multiplies with their codes.
    """

    name: str
    read: Read
    is_companion: Callable[[str], object]
    settings: Mapping[str, Any]
    evidence: str
    kinds: Mapping[str, str] = field(default_factory=dict)
    unpacks: bool = False

    @property
    def layout(self) -> Callable[[Quantized], Layout] | None:
        """Return what tells how weights can be read in parts; None if they are read whole."""
        return _LAYOUTS.get(self.read)


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
_LAYOUTS: dict[Read, Callable[[Quantized], Layout]] = {
    gptq.read_gptq: gptq.layout_of_gptq,
    awq.read_awq: awq.layout_of_awq,
}
"""Readers that lay codes out anew, and read no more of them than is held."""
_SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Methods of old checkpoints whose config does not mention them."""
DESCRIPTIONS = tuple(pattern for pattern, _ in _DESCRIPTIONS)
"""Name patterns of files that describe how the weights next to them are quantized."""
_LARGEST_DESCRIPTION = 64 << 20


def quantization_method(config: Any, name: str) -> Method | None:
    """Return a checkpoint's method of quantization according to its config or a file next to it.

    Args:
        config: config of the checkpoint, an object of transformers or the content of its file.
        name: its folder or hub id.

    Returns:
        None if neither mentions a method.

    Raises:
        ValueError: there is no reader for it, or its settings cannot be read; the message names the method.
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
        method = str(getattr(method, "value", method or "an unnamed method"))[:100]
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
    """Reject a quantized checkpoint for a purpose that only supports float checkpoints.

    Args:
        config: config of the checkpoint.
        name: its folder or hub id.
        purpose: the intended use, for the message.

    Raises:
        ValueError: it is quantized.
    """
    method = quantization_method(config, name)
    said = (
        "GGUF: the file begins so" if is_gguf(name) else "" if method is None else f"{method.name}: {method.evidence}"
    )
    if said:
        raise ValueError(
            f"model={name!r} is quantized ({said}), and {purpose} would be taken for "
            "floats; load it instead (pagoda inspect of a folder with weights, LLM), or pass the float checkpoint"
        )


def _checked(method: str, settings: Mapping[str, Any], name: str, evidence: str) -> Method:
    """Return the method, after checking its settings as a whole."""
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
                raise BadTensor(f"its config has packing_format={packing!r}; supported: 'auto_gptq', 'auto_awq'")
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
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ValueError(f"model={name!r}: {file.name} cannot be read: {error}; download it again") from error
    return found


def broken(name: str, method: str, what: str) -> ValueError:
    """Return the error for a quantized checkpoint that a reader cannot read."""
    return ValueError(f"model={name!r} is quantized ({method}), and {what}")


def _quantization_configs(config: Mapping[str, Any], place: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the entries about quantized weights of a config and its nested configs, with their dotted names."""
    for key, value in config.items():
        if key in _CONFIG_KEYS:
            if value is not None:
                yield place + key, value
        elif isinstance(value, Mapping):
            yield from _quantization_configs(value, f"{place}{key}.")


def check_stored(tensors: Mapping[str, StoredTensor], name: str) -> None:
    """Reject, before anything is loaded, tensors whose names or dtypes show that they are codes.

    Raises:
        ValueError: the message names a tensor, and its method if known.
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
            raise refusal(name, "an unnamed method", f"{key!r} is {tensor.dtype}")


def split_name(key: str) -> tuple[str, str]:
    """Split a tensor's name into owner and last part; bitsandbytes' suffixes of a weight belong to its owner."""
    owner, part, leaf = key.rpartition(".weight.")
    if not part:
        owner, _, leaf = key.rpartition(".")
    return owner, leaf


def check_loaded(tensors: Mapping[str, StoredTensor], model: nn.Module, unexpected: Iterable[str], name: str) -> None:
    """Reject, after loading, codes that transformers cast to floats, and leftover tensors of a weight that it loaded.

    Args:
        tensors: tensors of the checkpoint.
        model: model loaded from them.
        unexpected: names that transformers did not use.
        name: the checkpoint's folder or hub id.

    Raises:
        ValueError: the message names a tensor.
    """
    left_over = set(unexpected)
    kept = model.state_dict()
    for key in sorted(left_over):
        beside = _beside(key, kept)
        if beside:
            raise ValueError(
                f"model={name!r} holds {key!r}, but {type(model).__name__} reads {beside!r} without it and would "
                "serve wrong weights; if they are quantized, pass the float checkpoint they come from, else one of "
                "this architecture"
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
            raise refusal(name, "an unnamed method", f"{key!r} is {tensor.dtype}")


def check_orientation(made: Iterable[str], model: PreTrainedModel, name: str, method: Method) -> None:
    """Reject weights ``[out, in]`` from a reader for modules that store them ``[in, out]``: a square weight would be
    served transposed.

    Args:
        made: names of the weights.
        model: model loaded with them.
        name: the checkpoint's folder or hub id.
        method: method of quantization.

    Raises:
        ValueError: the message names a weight.
    """
    turned = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Conv1D)}
    turned |= {key.removeprefix(f"{model.base_model_prefix}.") for key in turned}
    for key in sorted(turned.intersection(made)):
        raise refusal(name, method.name, f"{key!r} belongs to a Conv1D, which stores its weight transposed")


def _beside(key: str, kept: Mapping[str, Any]) -> str:
    """Return the loaded weight that a tensor seems to belong to; "" for none.

    It is the weight whose name the tensor's name extends, or that of a module that contains the tensor.
    """
    for end in range(len(key) - 1, 0, -1):
        if key[end] in "._:" and key[:end] in kept:
            return key[:end]
        if key[end] == "." and f"{key[:end]}.weight" in kept:
            return f"{key[:end]}.weight"
    return ""


def refusal(name: str, method: str, evidence: str) -> ValueError:
    """Return the error for an unsupported quantized checkpoint: evidence, method and remedy."""
    return ValueError(
        f"model={name!r} is quantized ({method}: {evidence}), which is not supported; pass the float checkpoint that "
        "it was made from, and quantization='int8' or 'int4' to quantize it at load time"
    )
