"""Limits of the operators of the gated delta rule.

Sources: op-plugin, docs `torch_npu-npu_chunk_gated_delta_rule.md` and `…-npu_recurrent_gated_delta_rule.md`; CANN's
ops-transformer, `aclnnRecurrentGatedDeltaRule.md`.

- ``g`` of the operator over chunks is documented as -1 to 0, and models decay by far more in a token. A
  kernel that divides exponentials of sums yields NaN there; a newer one subtracts the sums first. Nothing but a call
  tells which one a release has: ``passes.lower.npu.delta_rule_probe``.
- The document of the operator over chunks lists 950. vllm-ascend (`ops/gdn.py`) notes that no release has it there.
- Float32 states of the recurrent operator are in CANN's document alone; op-plugin's says bfloat16. The probe tells.
- The recurrent operator is documented for single calls and graphs of fixed sizes.
"""

from __future__ import annotations

import torch

from .call import Call
from .rules import A2, A3, BF16, FLOAT, INT32, Limits, Rule, dense, lowered, needed, shaped, stored_as

MAX_RECURRENT_TOKENS = 8
"""Tokens of a sequence that ``npu_recurrent_gated_delta_rule`` takes."""


def _delta_shapes(most_heads: int, most_dims: int) -> Rule:
    """Heads and their sizes."""

    def check(call: Call) -> str:
        key, value = call.shape("key"), call.shape("value")
        heads, dims = (key[1], value[1]), (key[2], value[2])
        if any(n is None or n > most_heads for n in heads):
            return f"it has heads {heads}; at most {most_heads} are taken"
        if any(n is None or n > most_dims for n in dims):
            return f"it has heads of {dims} dims; at most {most_dims} are taken"
        of_keys, of_values = (int(n or 1) for n in heads)
        if of_values % of_keys:
            return f"heads of values {of_values} are not a multiple of those of keys {of_keys}"
        return ""

    return check


def _eager_or_captured(call: Call) -> str:
    """Torchair has a converter, which always raises."""
    return "torchair's GE converter for it raises" if call.target.graph_mode == "ge" else ""


NOT_IN_GE = "it is documented for single calls and graphs of fixed sizes; those of GE graphs vary"


def _fixed_sizes(call: Call) -> str:
    return NOT_IN_GE if call.target.graph_mode == "ge" else ""


_TENSORS = "query [T, K, D], key [T, K, D], value [T, V, E], beta [T, V], g [T, V], gk [T, V, D]"

LIMITS = {
    "npu_chunk_gated_delta_rule": Limits(
        frozenset({A2, A3}),
        {"query": BF16, "initial_state": BF16, "g": FLOAT, "actual_seq_lengths": INT32},
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
            _delta_shapes(64, 128),
            # Logarithms of decays, whatever float32 counts as elsewhere.
            lowered(stored_as("g", torch.float32)),
            dense("query", "key", "value", "beta", "initial_state", "g", "actual_seq_lengths"),
        ],
    ),
    "npu_recurrent_gated_delta_rule": Limits(
        frozenset({A2, A3}),
        {"query": BF16, "state": FLOAT, "g": FLOAT, "gk": FLOAT, "actual_seq_lengths": INT32},
        alike=[("query", "key", "value", "beta")],
        ranks={"query": (3,), "key": (3,), "value": (3,)},
        rules=[
            lowered(_fixed_sizes),
            needed("beta", "actual_seq_lengths", "ssm_state_indices"),
            shaped(f"{_TENSORS}, state [S, V, E, D]"),
            _delta_shapes(256, 512),
            lowered(stored_as("g", torch.float32)),
            dense("query", "key", "value", "beta", "state", "g"),
        ],
    ),
}
