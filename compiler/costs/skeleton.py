"""A model built from its configuration alone: few layers, and no values in its weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture.layer_kinds import find_decoder_layers, layer_kinds
from ..live_module.describer import CannotIdentify

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Skeleton:
    """A model whose layers stand for those of a larger one.

    Attributes:
        model: in eval mode, its weights uninitialized; it can be compiled and not run.
        representatives: for each layer of the whole model the layer of ``model`` that is like it. The first and the
            last represent themselves alone, for what lies around the layers is fused into them.
    """

    model: nn.Module
    representatives: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Layers of ``model``."""
        return max(self.representatives) + 1


def build_skeleton(kind: Any, config: Any, dtype: torch.dtype | None = None, marks: Sequence[str] = ()) -> Skeleton:
    """Build a transformers model with as few layers as show every kind of its layers.

    All are built where a layer would be another one in a model with fewer, as where the last ones share their keys.

    Args:
        kind: class of the model.
        config: its configuration, which is not changed.
        dtype: of its weights; None for what the configuration says, or bf16.
        marks: for each layer of the whole model, what distinguishes it in addition to its configuration; () for
            nothing.
    """
    config = copy.deepcopy(config)
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    kinds = _kinds(kind, config)
    told = [f"{kind} {mark}" for kind, mark in zip(kinds, marks, strict=True)] if marks and kinds else kinds
    representatives = _first_alike(told)
    depth = max(representatives, default=0) + 1
    if depth < len(representatives):
        few = copy.deepcopy(config)
        _cut_layers(few.get_text_config(decoder=True), depth)
        if _kinds(kind, few) == kinds[:depth]:
            return Skeleton(_without_values(kind, few, dtype), representatives)
    layers = config.get_text_config(decoder=True).num_hidden_layers
    return Skeleton(_without_values(kind, config, dtype), identity(layers))


def identity(layers: int) -> tuple[int, ...]:
    """``representatives`` of a whole model."""
    return tuple(range(layers))


def _without_values(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model; memory that nobody writes to costs nothing."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: nn.Module = kind._from_config(config, dtype=dtype)
    model.tie_weights()  # type: ignore[operator]
    return model.eval().requires_grad_(False)


def _kinds(kind: Any, config: Any) -> list[str]:
    """A digest of each decoder layer of the whole model; [] where they are not found."""
    depth = config.get_text_config(decoder=True).num_hidden_layers
    try:
        with torch.device("meta"):
            model = kind._from_config(copy.deepcopy(config))
    except Exception as error:  # a model that computes with its buffers while it is built
        logger.info("could not build on the meta device, using all %d layers: %s", depth, error)
        return []
    _, layers = find_decoder_layers(model)
    if len(layers) != depth:
        return []
    try:
        return layer_kinds(model, layers, any_depth=True)
    except CannotIdentify as error:
        logger.info("using all %d layers: %s", depth, error)
        return []


def _first_alike(kinds: Sequence[str]) -> tuple[int, ...]:
    """For each layer one of the first few that is like it, the first and the last one for themselves."""
    whole = len(kinds)
    for depth in range(3, whole):
        inner = {kind: i for i, kind in reversed(list(enumerate(kinds[: depth - 1]))) if i}
        if kinds[depth - 1] == kinds[-1] and set(kinds[1:-1]) <= set(inner):
            return (0, *(inner[kind] for kind in kinds[1:-1]), depth - 1)
    return identity(whole)


def _cut_layers(config: Any, depth: int) -> None:
    """Leave the first layers of a text configuration."""
    whole = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:depth])
    config.num_hidden_layers = depth
