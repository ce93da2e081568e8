"""Limits of the operators of the gated delta rule (op-plugin's documents).

The decays ``g`` are documented as logarithms from -1 to 0, which nothing tells before a step is run: models have
smaller ones, and vllm-ascend passes them.
"""

from __future__ import annotations

import torch

from ....runtime.ops.npu.gated_delta_rule import MAX_DELTA_DIM, MAX_DELTA_HEADS
from ...graph.npu_target import Product
from .call import Call


def delta_shapes(call: Call) -> str:
    """Heads and their sizes, and one decay per head."""
    key, value = call.shape("key"), call.shape("value")
    heads, dims = (key[1], value[1]), (key[2], value[2])
    if any(n is None or n > MAX_DELTA_HEADS for n in heads):
        return f"it has heads {heads}; at most {MAX_DELTA_HEADS} are taken"
    if any(n is None or n > MAX_DELTA_DIM for n in dims):
        return f"it has heads of {dims} dims; at most {MAX_DELTA_DIM} are taken"
    return f"heads of values {heads[1]} are no multiple of those of keys {heads[0]}" if heads[1] % heads[0] else ""  # type: ignore[operator]


def float32_decays(call: Call) -> str:
    """Logarithms of decays, whatever float32 counts as elsewhere."""
    decays = call.tensor("g")
    return "" if decays is None or decays.dtype is torch.float32 else f"g is {decays.dtype}; it must be float32"


def chunk_state(call: Call) -> str:
    """States that are needed, in bfloat16; 950 takes float32, too."""
    dtype = call.dtype("initial_state")
    allowed = {torch.bfloat16} | ({torch.float32} if call.target.product is Product.A5 else set())
    return (
        "" if dtype in allowed else f"initial_state is {dtype}; it must be {' or '.join(sorted(map(str, allowed)))}"
    )


def eager_or_captured(call: Call) -> str:
    """Torchair has a converter, which always raises."""
    return "torchair's GE converter for it raises" if call.target.graph_mode == "ge" else ""
