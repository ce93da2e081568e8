"""Limits of what writes caches and states: op-plugin docs npu_scatter_pa_kv_cache and npu_scatter_nd_update_."""

from __future__ import annotations

import torch

from .call import Call
from .rules import (
    A2,
    A3,
    A5,
    INDEX,
    INFERENCE,
    Limits,
    dense,
    given,
    in_reference,
    lowered,
    on_inference_chip,
    shaped,
)


def _cache_write(call: Call) -> str:
    key, value = call.shape("key"), call.shape("value")
    key_cache, value_cache = call.shape("key_cache"), call.shape("value_cache")
    if call["cache_mode"] not in ("Norm", "PA_NZ"):
        return f"cache_mode is {call['cache_mode']!r}; say 'Norm' or 'PA_NZ'"
    if call["cache_mode"] == "Norm" and (key_cache[2:] != key[1:] or value_cache[2:] != value[1:]):
        return f"key {key} and value {value} do not fit caches {key_cache} and {value_cache}"
    if key_cache[:2] != value_cache[:2] and None not in key_cache[:2] + value_cache[:2]:
        return f"caches of {key_cache[:2]} and {value_cache[:2]} blocks and tokens"
    return ""


LIMITS = {
    "npu_scatter_pa_kv_cache": Limits(
        frozenset({A2, A3, A5}),
        {"slot_mapping": INDEX},
        alike=[("key", "value", "key_cache", "value_cache")],
        ranks={"key": (3,), "value": (3,), "key_cache": (4,), "value_cache": (4,)},
        rules=[
            lowered(_cache_write),
            in_reference(given("cache_mode", None, "Norm", "PA_NZ")),
            shaped("key [T, N, D], value [T, N, E], slot_mapping [T]"),
            dense("key", "value", "key_cache", "value_cache"),
        ],
    ),
    # op-plugin names no 950; the README of CANN's own scatter_nd_update (ops-nn) does, and vllm-ascend runs it there.
    "npu_scatter_nd_update_": Limits(
        frozenset({A2, A3, A5, INFERENCE}),
        {"indices": INDEX},
        alike=[("input", "updates")],
        rules=[
            on_inference_chip(
                lambda c: f"input is {torch.int8}, which it does not write" if c.dtype("input") is torch.int8 else ""
            )
        ],
    ),
}
