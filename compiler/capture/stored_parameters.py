"""Parameters that are quantized weights: placeholders for tracing, and conversion to floats."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...runtime.ops.linear.stored_weight import StoredWeight

_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0)


@contextmanager
def placeholders_for_stored(model: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replace stored weights by parameters of their shapes and dtypes for a while, which nobody reads: they take
    addresses and no memory.

    Yields:
        ``id`` of a placeholder → the parameter that it stands for.
    """
    standing: dict[int, nn.Parameter] = {}
    made: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if not isinstance(parameter, StoredWeight):
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = placeholder = nn.Parameter(empty_pages(parameter), requires_grad=False)
                    standing[id(placeholder)] = parameter  # type: ignore[assignment]
                places.append((module, name, parameter))  # type: ignore[arg-type]
                module._parameters[name] = made[id(parameter)]
        yield standing
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def has_stored_parameters(model: nn.Module) -> bool:
    """Tell whether some of a model's weights are as a quantized checkpoint stores them."""
    return any(isinstance(parameter, StoredWeight) for parameter in model.parameters())


def latent_attention_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names of the stored weights of attention over a latent, and the modules that hold them.

    On an NPU such attention reads parts of them that are laid out anew, which only floats can be.
    """
    for path, attention in model.named_modules():
        if not isinstance(getattr(attention, "kv_lora_rank", None), int) or not hasattr(attention, "kv_b_proj"):
            continue
        for name, module in attention.named_children():
            if isinstance(module._parameters.get("weight"), StoredWeight) and name != "o_proj":
                yield f"{path}.{name}.weight", module


def unpack_latent_attention(model: nn.Module) -> list[str]:
    """Replace those weights by what they mean, for good, and free them; returns their names."""
    made: dict[int, nn.Parameter] = {}
    names: list[str] = []
    for name, module in latent_attention_weights(model):
        weight = module._parameters["weight"]
        assert isinstance(weight, StoredWeight)
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(weight.dense(), requires_grad=False)
        module._parameters["weight"] = made[id(weight)]
        names.append(name)
    return names


def empty_pages(like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the shape and dtype of another one, whose pages are not there until they are written."""
    size = max(math.prod(like.shape) * like.dtype.itemsize, 1)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
    return torch.frombuffer(pages, dtype=like.dtype, count=math.prod(like.shape)).view(like.shape)
