"""Limits of the operators of the gated delta rule (op-plugin's documents).

The decays ``g`` are documented as logarithms from -1 to 0, which nothing tells before a step is run: models have
smaller ones, and vllm-ascend passes them.
"""

from __future__ import annotations

import torch

from .call import Call
from .rules import A2, A3, A5, BF16, FLOAT, INT32, Limits, dense, lowered, needed, shaped, stored_as

MAX_RECURRENT_TOKENS = 8
"""Tokens of a sequence that ``npu_recurrent_gated_delta_rule`` takes."""
_MAX_DELTA_HEADS, _MAX_DELTA_DIM = 64, 128


def _delta_shapes(call: Call) -> str:
    """Heads and their sizes, and one decay per head."""
    key, value = call.shape("key"), call.shape("value")
    heads, dims = (key[1], value[1]), (key[2], value[2])
    if any(n is None or n > _MAX_DELTA_HEADS for n in heads):
        return f"it has heads {heads}; at most {_MAX_DELTA_HEADS} are taken"
    if any(n is None or n > _MAX_DELTA_DIM for n in dims):
        return f"it has heads of {dims} dims; at most {_MAX_DELTA_DIM} are taken"
    return f"heads of values {heads[1]} are not a multiple of those of keys {heads[0]}" if heads[1] % heads[0] else ""  # type: ignore[operator]


def _chunk_state(call: Call) -> str:
    """States that are needed, in bfloat16; 950 takes float32, too."""
    dtype = call.dtype("initial_state")
    allowed = {torch.bfloat16} | ({torch.float32} if call.target.product is A5 else set())
    return (
        "" if dtype in allowed else f"initial_state is {dtype}; it must be {' or '.join(sorted(map(str, allowed)))}"
    )


def _eager_or_captured(call: Call) -> str:
    """Torchair has a converter, which always raises."""
    return "torchair's GE converter for it raises" if call.target.graph_mode == "ge" else ""


_TENSORS = "query [T, K, D], key [T, K, D], value [T, V, E], beta [T, V], g [T, V], gk [T, V, D]"

LIMITS = {
    "npu_chunk_gated_delta_rule": Limits(
        frozenset({A2, A3, A5}),
        {"query": BF16, "initial_state": FLOAT, "g": FLOAT, "actual_seq_lengths": INT32},
        alike=[("query", "key", "value", "beta")],
        ranks={
            "query": (3,),
            "key": (3,),
            "value": (3,),
            "beta": (2,),
            "initial_state": (4,),
            "actual_seq_lengths": (1,),
        },
        rules=[
            lowered(_eager_or_captured),
            needed("beta", "initial_state", "actual_seq_lengths"),
            shaped(f"{_TENSORS}, initial_state [B, V, E, D], actual_seq_lengths [B]"),
            _delta_shapes,
            # Logarithms of decays, whatever float32 counts as elsewhere.
            lowered(stored_as("g", torch.float32)),
            lowered(_chunk_state),
            dense("query", "key", "value", "beta", "initial_state", "g", "actual_seq_lengths"),
        ],
    ),
    "npu_recurrent_gated_delta_rule": Limits(
        frozenset(),
        dict.fromkeys(("query", "key", "value", "beta", "state", "g", "gk"), FLOAT),
        ranks={"query": (3,), "key": (3,), "value": (3,)},
        rules=[
            needed("beta", "actual_seq_lengths", "ssm_state_indices"),
            shaped(f"{_TENSORS}, state [S, V, E, D]"),
            _delta_shapes,
        ],
    ),
}
