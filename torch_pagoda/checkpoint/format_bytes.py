"""The formats that a quantised checkpoint stores its weights in, layer by layer, and the bytes that they take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..runtime.ops.quantized_weight import packed_bytes, scheme_of, unpackable
from ..runtime.ops.stored_weight import StoredWeight
from .loading import quantized_tensors

_LAYER = re.compile(r"\.(\d+)\.")
_EXPERTS = re.compile(r"\bexperts\b")


@dataclass(frozen=True)
class FormatBytes:
    """The weights of one format in one layer.

    Attributes:
        layer: its number; None: outside of all layers.
        form: as ``WeightFormat`` spells it, or a dtype of floats.
        served: how they are held: ``"as stored"``, ``"as int8"``, ``"unpacked"``, ``"float"``.
        weights: how many tensors.
        stored_bytes: of codes, scales, zeros and orders, as they are read.
        served_bytes: in the program.
        float_bytes: as floats of the model's dtype.
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
    """The formats of a model's weights, in the order of its layers.

    Args:
        tensors: names and weights, of a module or as a reader yields them; none is kept.
        dtype: of the model.
        target: that serves them, ``"cpu"`` or ``"npu"``.
        unpacked: names of weights that are unpacked whatever their format is.
        tied: the config says that the head is the embeddings, so that a float model has none of its own.
    """
    unpacked = frozenset(unpacked)
    found: dict[tuple[int, str, str], FormatBytes] = {}
    for name, tensor in tensors:
        match = _LAYER.search(name)
        layer = None if match is None else int(match[1])
        one = _of_weight(layer, name, tensor, dtype, target=target, unpacks=name in unpacked)
        if tied and name == "lm_head.weight":
            one = replace(one, float_bytes=0)
        key = (-1 if layer is None else layer, one.form, one.served)
        found[key] = one if key not in found else _sum(found[key], one)
    return [found[key] for key in sorted(found)]


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
    if target == "npu":  # as passes/lower/npu takes them; the limits of operators may leave more of them floats
        unpacks = unpacks or form.code != "int" or (in_experts and form.input_bits != 8)
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


def _sum(first: FormatBytes, second: FormatBytes) -> FormatBytes:
    return replace(
        first,
        weights=first.weights + second.weights,
        stored_bytes=first.stored_bytes + second.stored_bytes,
        served_bytes=first.served_bytes + second.served_bytes,
        float_bytes=first.float_bytes + second.float_bytes,
    )


def formats_of_files(name: str, config: Any, dtype: torch.dtype) -> list[FormatBytes] | None:
    """The formats of a quantised checkpoint, whose tensors are read one after the other; None for a float one.

    Args:
        name: folder or hub id.
        config: the checkpoint's.
        dtype: of the model.

    Raises:
        ValueError: it is quantised, and its weights are not there or cannot be read.
    """
    tensors = quantized_tensors(name, config, dtype)
    if tensors is None:
        return None
    return formats_of(tensors, dtype, tied=getattr(config.get_text_config(), "tie_word_embeddings", False))


def served_change(formats: Iterable[FormatBytes]) -> int:
    """By how many bytes served weights differ from the same as floats."""
    return sum(one.served_bytes - one.float_bytes for one in formats)
