"""What int8 means, computed by transformers' own forward whose linear layers are a formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight


def int8_weight(weight: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers ``[out, in]`` and scales ``[out, 1]``, float64: ``max|w| / 127`` of a row, rounded to a dtype."""
    wide = weight.detach().float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = (largest / 127).to(scale_dtype).float()
    exact = wide * (127 / largest) if scale_dtype is torch.float32 else wide / scale
    return exact.round().clamp(-127, 127).double(), scale.double()


def int8_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers ``[..., in]`` and scales ``[..., 1]``, float64, by float32's arithmetic."""
    wide = rows.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, wide / scale, 0.0).round().double(), scale.double()


def int8_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A linear layer of 8 bits, in the dtype of ``rows``."""
    numbers, scale = int8_weight(weight, scale_dtype)
    whole, unit = int8_rows(rows)
    product = (whole @ numbers.T) * scale.T * unit
    return (product if bias is None else product + bias.double()).to(rows.dtype)


def rounded_rows_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer that reads its inputs in 8 bits with a scale for each row, in the dtype of ``rows``."""
    whole, unit = int8_rows(rows)
    product = (whole @ weight.double().T) * unit
    return (product if bias is None else product + bias.double()).to(rows.dtype)


def given_rows_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, offset: int
) -> torch.Tensor:
    """A linear layer that reads its inputs in 8 bits by a scale and an offset, in the dtype of ``rows``."""
    whole = (rows.float() / scale + offset).round().clamp(-128, 127).double() - offset
    product = (whole @ weight.double().T) * scale
    return (product if bias is None else product + bias.double()).to(rows.dtype)


_OWN_SCALES = "a scale for each row"


@contextmanager
def _inputs_read(model: PreTrainedModel, how: Callable[[nn.Linear, str], Any], of_experts: Any) -> Iterator[None]:
    """Let the layers of a model read their inputs, for a while, as ``how`` says of a layer and its name: None, as
    they are; ``_OWN_SCALES``; or a scale and an offset."""
    names, forward = {module: name for name, module in model.named_modules()}, nn.Linear.forward

    def of_layer(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        given = how(layer, names[layer])
        if given is None:
            return forward(layer, x)
        if given == _OWN_SCALES:
            return rounded_rows_linear(x, layer.weight, layer.bias)
        return given_rows_linear(x, layer.weight, layer.bias, *given)

    with _computed(model, of_layer, of_experts):
        yield


def inputs_of_8_bits(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Let the layers of a model, but for its head and its routers, and every matrix of its experts read their inputs
    in 8 bits with a scale for each row for a while; the weights stay what they are."""
    return given_inputs(model, {})


def given_inputs(model: PreTrainedModel, given: Mapping[str, tuple[float, int]]) -> AbstractContextManager[None]:
    """Let the layers of these names read their inputs by their scale and offset for a while, all other layers but the
    head and routers with a scale for each row."""
    head = model.get_output_embeddings()
    return _inputs_read(
        model, lambda layer, name: None if layer is head else given.get(name, _OWN_SCALES), rounded_rows_linear
    )


def inputs_as_made(model: PreTrainedModel, stored: nn.Module) -> AbstractContextManager[None]:
    """Let the linear layers of a float model read their inputs, for a while, as the weights of the same model over a
    quantized checkpoint were made for: as they are, in 8 bits with a scale for each row, or by a given scale; experts
    as they are."""
    weights = dict(stored.named_parameters())

    def how(_: nn.Linear, name: str) -> Any:
        weight = weights.get(f"{name}.weight")
        if not isinstance(weight, StoredWeight) or weight.form.input_bits != 8:
            return None
        return _OWN_SCALES if weight.input_scale is None else weight.input_scale

    return _inputs_read(model, how, F.linear)


@contextmanager
def int8_linears(model: PreTrainedModel) -> Iterator[None]:
    """Let every ``nn.Linear`` of a model, and every matrix of its experts, be one of 8 bits for a while."""
    with _computed(model, lambda layer, x: int8_linear(x, layer.weight, layer.bias), int8_linear):
        yield


@contextmanager
def _computed(
    model: PreTrainedModel,
    of_layer: Callable[[nn.Linear, torch.Tensor], torch.Tensor],
    of_matrix: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
) -> Iterator[None]:
    """Let each ``nn.Linear`` of a model be ``of_layer``, and each matrix of its experts ``of_matrix``."""
    experts = {p.untyped_storage().data_ptr() for p in model.parameters() if p.dim() == 3}
    linear, before = F.linear, getattr(model.config, "_experts_implementation", None)

    def of_expert(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_expert = weight.untyped_storage().data_ptr() in experts
        return (of_matrix if is_expert else linear)(x, weight, bias)

    if experts:
        model.config._experts_implementation = "eager"
    try:
        with mock.patch.object(nn.Linear, "forward", of_layer), mock.patch.object(F, "linear", of_expert):
            yield
    finally:
        if experts:
            model.config._experts_implementation = before
