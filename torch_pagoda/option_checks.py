"""Checks of LLM's options that need neither a model nor a device, so that a mistake is refused before anything
loads."""

from __future__ import annotations

from typing import Any

from .runtime.batching import make_policy, preemption_mode
from .runtime.cache.kv_cache import parse_memory

LIMITS = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queue")
"""Options that are whole numbers of at least 1."""

_MAY_BE_NONE = ("block_size", "num_blocks", "max_model_len", "max_queue")


def check_limits(limits: dict[str, Any]) -> None:
    """Refuse limits that are not whole numbers of at least 1; some may be None, for unset."""
    for name, value in limits.items():
        if value is None and name in _MAY_BE_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a whole number of at least 1; use one, or leave it out")


def check_scheduling(policy: str, preemption: str, enable_prefix_caching: bool) -> None:
    """Refuse unknown names before anything is loaded."""
    make_policy(policy)
    preemption_mode(preemption)
    if not isinstance(enable_prefix_caching, bool):
        raise ValueError(f"enable_prefix_caching={enable_prefix_caching!r} is not a bool; use True or False")


def check_swap_space(swap_space: int | str) -> int:
    """Bytes of ``swap_space``; 0 for none."""
    return 0 if swap_space in (0, "0") else parse_memory(swap_space, "swap_space")


def check_cache_size(num_blocks: int | None, kv_cache_memory: int | str | None) -> int | None:
    """Bytes of ``kv_cache_memory``, or None; refuses both sizes together."""
    if num_blocks is not None and kv_cache_memory is not None:
        raise ValueError(
            f"num_blocks={num_blocks} and kv_cache_memory={kv_cache_memory!r} both size the KV cache; "
            "give one of them"
        )
    return None if kv_cache_memory is None else parse_memory(kv_cache_memory)
