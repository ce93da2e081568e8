"""Checks, before tracing or loading, whether a model keeps state that no operator supports."""

from __future__ import annotations

import inspect
from typing import Any

from ...passes.graph.traced import UnsupportedModel
from .kernel_functions import has_kernel_functions
from .recurrent_modules import has_recurrent_modules


def check_state(model_class: type, config: Any) -> None:
    """Raise ``UnsupportedModel`` for a model of which :func:`kept_state` knows that it keeps state.

    State of kernel functions and of known modules is served, see ``kernel_functions`` and ``recurrent_modules``.
    """
    if not has_recurrences(model_class) and (state := kept_state(model_class, config)):
        raise UnsupportedModel(f"{model_class.__name__} is not served yet: {state}")


def has_recurrences(model_class: type) -> bool:
    """True if a model's Python module has convolutions or recurrences that are traced as operators."""
    return has_kernel_functions(model_class) or has_recurrent_modules(model_class)


def kept_state(model_class: type, config: Any) -> str:
    """Say how many of a model's layers keep recurrent or convolutional state but no keys and values; "" if none does.

    The passes judge layers that keep state in addition to keys and values, since that may be only the last inputs of
    a convolution. The count comes from the cache that transformers creates for the config, because the config decides
    whether a class has layers of one kind or of both. It includes models without such a cache whose class says that
    they have state.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # a config of the checkpoint's own code; tracing will tell
        layers = []
    states = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers]
    found = [i for i, layer in enumerate(layers) if states[i] and not isinstance(layer, CacheLayerMixin)]
    if found:
        return (
            f"{len(found)} of its {len(layers)} layers keep recurrent or convolutional state (layer {found[0]} first)"
        )
    taken = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    # The latter is its name since transformers 5.24.
    if getattr(model_class, "_is_stateful", False) and not {"past_key_values", "cache"} & set(taken):
        return "its layers keep recurrent state and no keys and values"
    return ""
