"""Storage formats of a quantized checkpoint's weights by layer, and their sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ..runtime.ops.linear.quantized_weight import packed_bytes, scheme_of, unpackable
from ..runtime.ops.linear.stored_weight import StoredWeight
from ..runtime.ops.linear.weight_format import WeightFormat
from .gguf.checkpoint import GgufCheckpoint, open_gguf
from .gguf.container import GgufTensor, is_gguf
from .loading import quantized_tensors

_LAYER = re.compile(r"\.(\d+)\.")
_EXPERTS = re.compile(r"\bexperts\b")


@dataclass(frozen=True)
class FormatBytes:
    """The weights of one format in one layer.

    Attributes:
        layer: layer index; None: outside the layers.
        form: name of a ``WeightFormat``, of a ggml type, or of a float dtype.
        served: form in the program: ``"as stored"``, ``"as int8"``, ``"unpacked"``, ``"float"``; for a GGUF file's
            embeddings that are also the head ``"twice"``, unpacked and in the head's form.
        weights: number of tensors.
        stored_bytes: bytes of codes, scales, zeros and orders in the checkpoint.
        served_bytes: bytes in the program.
        float_bytes: bytes as floats of the model's dtype.
    """

    layer: int | None
    form: str
    served: str
    weights: int
    stored_bytes: int
    served_bytes: int
    float_bytes: int


def formats_of(
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    *,
    target: str = "cpu",
    unpacked: Iterable[str] = (),
    tied: bool = False,
) -> list[FormatBytes]:
    """Return the formats of a model's weights, in the order of its layers.

    Args:
        tensors: names and weights, of a module or from a reader; none is kept.
        dtype: dtype of the model.
        target: device that runs the model, ``"cpu"`` or ``"npu"``.
        unpacked: names of weights that are unpacked in any format.
        tied: the config ties the head to the embeddings, so a float model has no separate head.
    """
    unpacked = frozenset(unpacked)

    def each() -> Iterator[FormatBytes]:
        for name, tensor in tensors:
            one = _of_weight(_layer(name), name, tensor, dtype, target=target, unpacks=name in unpacked)
            yield replace(one, float_bytes=0) if tied and name == "lm_head.weight" else one

    return _by_layer(each())


def _layer(name: str) -> int | None:
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def _by_layer(weights: Iterable[FormatBytes]) -> list[FormatBytes]:
    """Merge the entries of a layer that are stored and served in the same form."""
    found: dict[tuple[int, str, str], FormatBytes] = {}
    for one in weights:
        key = (-1 if one.layer is None else one.layer, one.form, one.served)
        found[key] = one if key not in found else _sum(found[key], one)
    return [found[key] for key in sorted(found)]


def formats_of_gguf(file: GgufCheckpoint, dtype: torch.dtype, *, target: str = "cpu") -> list[FormatBytes]:
    """Return the formats of a GGUF file's weights from the types of its tensors, without reading these.

    Args:
        file: the file.
        dtype: dtype of the model.
        target: device that runs the model, ``"cpu"`` or ``"npu"``.
    """
    return _by_layer(
        _of_gguf(name, tensor, dtype, target, tied=file.values["tie_word_embeddings"])
        for _, _, name, tensor in file.placed
    )


def _of_gguf(name: str, tensor: GgufTensor, dtype: torch.dtype, target: str, *, tied: bool) -> FormatBytes:
    kind, numbers = tensor.type, prod(tensor.shape)
    floats = numbers * dtype.itemsize
    form = kind.form
    if kind.dtype is not None or len(tensor.shape) < 2:
        return FormatBytes(_layer(name), kind.name, "float", 1, tensor.nbytes, floats, floats)
    is_table = name == "model.embed_tokens.weight"
    in_experts = _EXPERTS.search(name) is not None
    floats_on_npu = target == "npu" and form is not None and _floats_on_npu(form, in_experts)
    if form is None or (is_table and not tied) or unpackable(form) or floats_on_npu:
        return FormatBytes(_layer(name), kind.name, "unpacked", 1, tensor.nbytes, floats, floats)
    *lead, outputs, inputs = tensor.shape
    size = prod(lead) * packed_bytes(outputs, inputs, scheme_of(form))
    served = "as stored" if kind.keeps_bits else f"as int{kind.bits}"
    if is_table:
        return FormatBytes(_layer(name), kind.name, "twice", 1, tensor.nbytes, size + floats, floats)
    return FormatBytes(_layer(name), kind.name, served, 1, tensor.nbytes, size, floats)


def _of_weight(
    layer: int | None, name: str, tensor: torch.Tensor, dtype: torch.dtype, *, target: str, unpacks: bool
) -> FormatBytes:
    floats = tensor.numel() * dtype.itemsize
    if not isinstance(tensor, StoredWeight):
        kept = floats if tensor.is_floating_point() else tensor.nbytes
        return FormatBytes(layer, str(tensor.dtype).removeprefix("torch."), "float", 1, tensor.nbytes, kept, kept)
    form = tensor.form
    in_experts = _EXPERTS.search(name) is not None
    unpacks = unpacks or bool(unpackable(form)) or (form.ordered and in_experts)
    if target == "npu":
        unpacks = unpacks or _floats_on_npu(form, in_experts)
    if unpacks:
        return FormatBytes(layer, str(form), "unpacked", 1, tensor.stored_bytes, floats, floats)
    *lead, outputs, _ = tensor.codes.shape
    inputs, scheme = tensor.codes.shape[-1] * form.per_byte, scheme_of(form)
    size = packed_bytes(outputs, inputs, scheme)
    for count in lead:
        size *= count
    if tensor.order is not None:
        size += tensor.order.nbytes
    served = "as stored" if scheme.bits == form.bits else f"as int{scheme.bits}"
    return FormatBytes(layer, str(form), served, 1, tensor.stored_bytes, size, floats)


def _floats_on_npu(form: WeightFormat, in_experts: bool) -> bool:
    """Return True if passes/lower/npu converts the weight to floats; operator limits may add more weights."""
    return form.code != "int" or (in_experts and form.bits == 8 and form.group_size > 0)


def _sum(first: FormatBytes, second: FormatBytes) -> FormatBytes:
    return replace(
        first,
        weights=first.weights + second.weights,
        stored_bytes=first.stored_bytes + second.stored_bytes,
        served_bytes=first.served_bytes + second.served_bytes,
        float_bytes=first.float_bytes + second.float_bytes,
    )


def formats_of_files(name: str, config: Any, dtype: torch.dtype, *, target: str = "cpu") -> list[FormatBytes] | None:
    """Return the formats of a quantized checkpoint, reading its tensors one by one; None for a float checkpoint.

    Args:
        name: folder, hub id or GGUF file.
        config: config of the checkpoint.
        dtype: dtype of the model.
        target: "cpu" or "npu"; the NPU keeps fewer formats as stored.

    Raises:
        ValueError: it is quantized, and its weights are missing or cannot be read.
    """
    if is_gguf(name):
        formats = formats_of_gguf(open_gguf(name), dtype, target=target)
        return formats if any(one.served != "float" for one in formats) else None
    tensors = quantized_tensors(name, config, dtype)
    if tensors is None:
        return None
    tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    return formats_of(tensors, dtype, tied=tied, target=target)


def served_change(formats: Iterable[FormatBytes]) -> int:
    """Return the bytes of the served weights minus their bytes as floats."""
    return sum(one.served_bytes - one.float_bytes for one in formats)
