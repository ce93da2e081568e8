"""The formats of a quantized checkpoint's weights as its config states them, without the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint.loading import without_quantization
from ..checkpoint.quantized import Method, broken
from ..checkpoint.readers import awq, compressed_tensors, fp8, gptq, mxfp4
from ..checkpoint.readers.module_settings import is_left_out, settings_of
from ..checkpoint.readers.parts import BadTensor, Read, scale_name
from ..compiler.capture.layer_kinds import find_decoder_layers
from ..runtime.ops.linear.weight_format import WeightFormat
from .stored_formats import Formats, store_as

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last name parts of small linear layers that GPTQ and AWQ leave alone."""


@dataclass(frozen=True)
class _Matrix:
    """A weight, or the weights of experts.

    Attributes:
        name: of its module, as a config calls it; of experts the first one's.
        inputs: of the layer.
        dtype: of the model.
        in_layers: it belongs to a decoder layer.
        of_experts: it is a parameter of experts, not the weight of a linear layer.
        transposed: experts keep it ``[E, in, out]``.
    """

    name: str
    inputs: int
    dtype: torch.dtype
    in_layers: bool
    of_experts: bool = False
    transposed: bool = False


def stated_model(kind: Any, config: Any, method: Method, name: str, dtype: torch.dtype | None) -> PreTrainedModel:
    """A quantized model on the meta device, its weights in the formats of ``stated_formats``.

    Args:
        kind: class of the model.
        config: the checkpoint's config.
        method, name: as for ``stated_formats``.
        dtype: of the model; None for what the config says, or bf16.

    Raises:
        ValueError: as ``stated_formats``.
    """
    plain = without_quantization(config)
    with torch.device("meta"):
        model: PreTrainedModel = kind._from_config(
            plain, dtype=dtype or getattr(plain, "dtype", None) or torch.bfloat16
        )
    model.tie_weights()
    store_as(model, stated_formats(model, method, name))
    return model.eval().requires_grad_(False)


def stated_formats(model: nn.Module, method: Method, name: str) -> Formats:
    """Return the format of each weight of a model, for ``store_as``.

    What a config does not state is taken as quantizers usually store it: scales of GPTQ and AWQ in float16, those of
    FP8 in float32, of compressed-tensors in the model's dtype; act-order shared by the layers that read one input.

    Args:
        model: built from the config, with or without values.
        method: from ``quantization_method``.
        name: the checkpoint's folder or hub id.

    Raises:
        ValueError: the config does not state the formats, or none of the model's weights has one.
    """
    if method.unpacks:
        return {}
    form_of = _FORMS.get(method.read)
    if form_of is None:
        raise broken(name, method.name, "only its weights tell their formats; download them")
    found: dict[str, list[Any]] = {}
    orders: dict[tuple[str, int], int] = {}
    try:
        for key, matrix in _matrices(model):
            settings = settings_of(method.settings, matrix.name)
            form = None if is_left_out(method.settings, matrix.name) else form_of(settings, matrix)
            if form is None:
                continue
            owner = matrix.name.rpartition(".")[0], matrix.inputs
            order = orders.setdefault(owner, len(orders)) if form.ordered else -1
            given = [1.0, 0] if form.static_inputs else None
            found[key] = [str(form), matrix.transposed, given, order]
    except BadTensor as error:
        raise broken(name, method.name, str(error)) from error
    if not found:
        raise broken(name, method.name, f"{type(model).__name__} has no weight that its config quantizes")
    return found


def _matrices(model: nn.Module) -> Iterator[tuple[str, _Matrix]]:
    """Yield the names of the weights that may be quantized, and what decides how."""
    layers, _ = find_decoder_layers(model)
    for path, module in model.named_modules():
        inside = path.startswith(f"{layers}.")
        if isinstance(module, nn.Linear):
            yield f"{path}.weight", _Matrix(path, module.in_features, module.weight.dtype, inside)
        elif path.endswith("experts"):
            transposed = bool(getattr(module, "is_transposed", False))
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3:
                    first = f"{path}.0.{leaf.replace('gate_up', 'gate')}"
                    inputs = parameter.shape[1 if transposed else 2]
                    yield f"{path}.{leaf}", _Matrix(first, inputs, parameter.dtype, inside, True, transposed)


def _of_gptq(settings: Mapping[str, Any], matrix: _Matrix) -> WeightFormat | None:
    if not _is_taken(settings, matrix):
        return None
    bits, size = settings.get("bits", 4), _group(settings.get("group_size"), matrix.inputs)
    # The zero of codes of 2 and 3 bits is not that of the 4 bits they are kept in.
    zeros = settings.get("sym", True) is not True or bits in (2, 3)
    return _form("int", 8 if bits == 8 else 4, size, "f16", zeros, bool(size) and settings.get("desc_act") is True)


def _of_awq(settings: Mapping[str, Any], matrix: _Matrix) -> WeightFormat | None:
    if not _is_taken(settings, matrix):
        return None
    size = _group(settings.get("group_size", settings.get("q_group_size")), matrix.inputs)
    return _form("int", 4, size, "f16", settings.get("zero_point", True) is True)


def _is_taken(settings: Mapping[str, Any], matrix: _Matrix) -> bool:
    """Return True for the layers that GPTQ and AWQ quantize: those of the decoder, and the head if that is stated."""
    router = matrix.name.rpartition(".")[2] in _ROUTERS
    return (matrix.in_layers and not router) or (matrix.name == "lm_head" and settings.get("lm_head") is True)


def _of_fp8(settings: Mapping[str, Any], matrix: _Matrix) -> WeightFormat | None:
    if matrix.name == "lm_head":
        return None
    return _form("e4m3", 8, _width(settings.get("weight_block_size")), "f32")


def _of_mxfp4(settings: Mapping[str, Any], matrix: _Matrix) -> WeightFormat | None:
    return _form("e2m1", 4, 32, "bf16") if matrix.of_experts else None


def _of_compressed(settings: Mapping[str, Any], matrix: _Matrix) -> WeightFormat | None:
    group = compressed_tensors.group_of_module(settings, matrix.name)
    if group is None:
        return None
    weights, scale = group["weights"], scale_name(matrix.dtype)
    kind = str(group.get("format") or settings.get("format"))
    bits, size = weights.get("num_bits"), _group(weights.get("group_size"), matrix.inputs)
    if weights.get("type", "int") == "float":
        if bits == 4:
            nvfp4 = kind.startswith("nvfp4")
            size = _group(weights.get("group_size", 16 if nvfp4 else 32), matrix.inputs)
            return _form("e2m1", 4, size, "f32" if nvfp4 else "bf16")
        if kind.startswith("mxfp8"):
            return _form("e4m3", 8, size, "bf16")
        return _form("e4m3", 8, _width(weights.get("block_structure")) or size, scale)
    zeros = weights.get("symmetric", True) is False
    if kind == "pack-quantized":
        ordered = bool(size) and weights.get("actorder") in ("group", "dynamic", True)
        return _form("int", bits, size, scale, zeros, ordered)
    static = not size and not matrix.of_experts and compressed_tensors.is_static(group.get("input_activations"))
    rounded = static or compressed_tensors.rounds_rows(settings)
    return _form("int", bits, size, scale, zeros, False, 8 if rounded else 0, static)


def _group(stated: Any, inputs: int) -> int:
    """Return how many inputs share a scale; 0: all."""
    return stated if isinstance(stated, int) and 0 < stated < inputs else 0


def _width(block: Any) -> int:
    """Return the inputs of a block of ``[outputs, inputs]`` that shares a scale; 0 without blocks."""
    is_block = isinstance(block, list | tuple) and len(block) == 2 and isinstance(block[1], int)
    return block[1] if is_block else 0


def _form(code: str, bits: Any, *more: Any) -> WeightFormat:
    try:
        return WeightFormat(code, bits, *more)
    except ValueError as error:
        raise BadTensor(f"its config states a format that is not supported: {error}") from error


_FORMS: dict[Read, Callable[[Mapping[str, Any], _Matrix], WeightFormat | None]] = {
    gptq.read_gptq: _of_gptq,
    awq.read_awq: _of_awq,
    fp8.read_fp8: _of_fp8,
    mxfp4.read_mxfp4: _of_mxfp4,
    compressed_tensors.read_compressed: _of_compressed,
}
"""By reader."""
