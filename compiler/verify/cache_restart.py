"""The length at which a model's own ``generate`` starts its cache anew, where its rotary table changes.

Llama keeps the keys that it has when a sequence grows past longrope's switch. Phi-3 and its kin drop the cache
there, in ``prepare_inputs_for_generation``, and recompute every key with the long table. The method is asked, not
read: it runs on a sequence of zeros with a cache of one narrow layer.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin

from ...passes import UnsupportedModel


def restart_length(model: nn.Module, switch: int) -> int | None:
    """``switch`` if generation starts its cache anew when a sequence grows beyond so many tokens, else None.

    Args:
        model: a causal LM; nothing of it runs but ``prepare_inputs_for_generation``.
        switch: the longest sequence that still uses the first rotary table.

    Raises:
        UnsupportedModel: it restarts at other lengths near the switch, or cannot be asked.
    """
    prepare = getattr(type(model), "prepare_inputs_for_generation", GenerationMixin.prepare_inputs_for_generation)
    if prepare is GenerationMixin.prepare_inputs_for_generation:
        return None
    near = range(switch - 1, switch + 3)
    try:
        restarts = [length for length in near if _drops_cache(model, length)]
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} changes its rotary table beyond {switch} tokens, and its "
            f"prepare_inputs_for_generation cannot be asked whether it drops the cache there ({error})"
        ) from error
    if restarts not in ([], [switch + 1]):
        raise UnsupportedModel(
            f"{type(model).__name__} changes its rotary table beyond {switch} tokens but drops its cache at "
            f"{', '.join(map(str, restarts))}; only a restart at {switch + 1} tokens can be served"
        )
    return switch if restarts else None


def _drops_cache(model: nn.Module, length: int) -> bool:
    """True if the cache of ``length - 1`` tokens is not used for the next one."""
    ids = torch.zeros(1, length, dtype=torch.int64)
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, length - 1, 1), torch.zeros(1, 1, length - 1, 1), 0)
    prepare = cast("Any", model).prepare_inputs_for_generation
    # The former is its name since transformers 5.24.
    name = "cache" if "cache" in inspect.signature(prepare).parameters else "past_key_values"
    inputs = prepare(
        ids,
        attention_mask=torch.ones_like(ids),
        next_sequence_length=1,
        use_cache=True,
        **{name: cache},
    )
    return inputs.get(name) is None
