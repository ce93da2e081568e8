"""Finds the decoder layers of a model, and which of them are equal as modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..live_module.describer import describe_module
from .model_facts import configs

PLACE = re.compile("layer_?(idx|id|index|number)|block_idx|idx|index")
"""Names of attributes and arguments that only say where a layer stands."""


def find_decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of a model's decoder layers, behind its qualified name; ("", an empty list) where there is none.

    It lies in no other list and is as long as the configuration says, or else the longest; of those that are left the
    one with most parameters.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    depths = {getattr(config, "num_hidden_layers", None) for config in configs(model)}

    def likeness(name: str) -> tuple[bool, int, int]:
        layers = lists[name]
        return len(layers) in depths, len(layers), sum(p.numel() for p in layers.parameters())

    path = max(outermost, key=likeness, default="")
    return path, lists.get(path, nn.ModuleList())


def layer_kinds(model: nn.Module, layers: Sequence[nn.Module], *, any_depth: bool = False) -> list[str]:
    """A digest for each layer; layers are alike where these are equal.

    What counts are classes, attributes, forms of tensors, and the layer's entry in each list of the configuration
    that has one for every layer; not where the layer stands, nor what its tensors hold.

    Args:
        model: on the CPU, or on the meta device.
        layers: its decoder layers, all of them.
        any_depth: leave out the configuration and its lists, so that layers of models with other numbers of layers
            can be alike.

    Raises:
        CannotIdentify: a layer holds something that cannot be described.
    """
    lists = [
        (name, item)
        for config in configs(model)
        for name, item in vars(config).items()
        if isinstance(item, list | tuple) and len(item) == len(layers)
    ]
    apart = {"config", *_attributes_that_are(layers, [item for _, item in lists])} if any_depth else set()

    def ignores(name: str) -> bool:
        return name in apart or PLACE.fullmatch(name) is not None

    def entries(index: int) -> list[tuple[str, Any]]:
        return [] if any_depth else [(name, item[index]) for name, item in lists]

    return [describe_module(layer, entries(index), ignores) for index, layer in enumerate(layers)]


def _attributes_that_are(layers: Sequence[nn.Module], lists: Sequence[Any]) -> set[str]:
    """Names of the attributes in which layers keep a list of the configuration's."""
    return {
        name
        for layer in layers
        for module in layer.modules()
        for name, item in vars(module).items()
        if isinstance(item, list | tuple) and not any(isinstance(x, torch.Tensor) for x in item) and item in lists
    }
