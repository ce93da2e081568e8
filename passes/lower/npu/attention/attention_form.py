"""A form of the attention kernel's call over a paged cache: what of it does not depend on the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .....runtime.ops.npu.limits.attention import UNLIMITED
from .attention_routes import Heads

_npu = torch.ops.npu
_CAUSAL, _BAND = 3, 4
LEAST_QUERIES = 2
"""Rows of queries that a sequence has in BSH. For one row the operator takes another kernel, for which documents call
``sparse_mode`` and ``pre_tokens`` invalid (see ``runtime.ops.npu.limits.attention``)."""


@dataclass(frozen=True)
class AttentionForm:
    """One form.

    Attributes:
        layout: "TND", tokens of all sequences one after the other, or "BSH", sequences padded to the longest and to
            ``LEAST_QUERIES``.
        heads: as they are stored.
        scale: of the scores.
        window: tokens that a query looks back over, its own included; 0: all.
        block_size: tokens in a block.
        dtype: of queries, keys and values.
        has_sinks: the softmax has one more logit for each head.
    """

    layout: str
    heads: Heads
    scale: float
    window: int
    block_size: int
    dtype: torch.dtype
    has_sinks: bool = False

    def __str__(self) -> str:
        window = f" and a window of {self.window}" if self.window else ""
        return f"{self.layout} with heads of {self.heads.key_dim}{window}"

    def query_shape(self, sequences: Any, tokens: Any) -> tuple[Any, ...]:
        """Of a step's queries, or in BSH of that many for each sequence."""
        heads, dim = self.heads.heads, self.heads.key_dim
        return (tokens, heads, dim) if self.layout == "TND" else (sequences, tokens, heads * dim)

    def cache_shapes(self, blocks: Any) -> tuple[tuple[Any, ...], ...]:
        """Of keys and values as the kernel reads them."""
        dims = self.heads.key_dim, self.heads.value_dim
        return tuple((blocks, self.block_size, self.heads.kv_heads * dim) for dim in dims)

    def call(
        self, query_lens: Any, kv_lens: Any, block_table: Any, mask: Any, sinks: Any = None
    ) -> tuple[torch._ops.OpOverload, dict[str, Any]]:
        """The kernel and its arguments but query, key and value.

        Args:
            query_lens: tokens of each sequence; in TND of it and those before it.
            kv_lens: context length of each sequence.
            block_table: ``[S, W]`` int32.
            mask: ``paged_attention.causal_mask``.
            sinks: ``[H]``, where the form has them.
        """
        common: dict[str, Any] = {
            "atten_mask": mask,
            "block_table": block_table,
            "num_key_value_heads": self.heads.kv_heads,
            "input_layout": self.layout,
            "sparse_mode": _BAND if self.window else _CAUSAL,
            # The band starts that many keys before the query's own.
            "pre_tokens": self.window - 1 if self.window else UNLIMITED,
            "next_tokens": 0 if self.window else UNLIMITED,
            "block_size": self.block_size,
            "inner_precise": 0,
        }
        if not self.has_sinks:
            return _npu.npu_fused_infer_attention_score.default, {
                **common,
                "actual_seq_lengths": query_lens,
                "actual_seq_lengths_kv": kv_lens,
                "num_heads": self.heads.heads,
                "scale": self.scale,
            }
        return _npu.npu_fused_infer_attention_score_v2.default, {
            **common,
            "actual_seq_qlen": query_lens,
            "actual_seq_kvlen": kv_lens,
            "learnable_sink": sinks,
            "num_query_heads": self.heads.heads,
            "softmax_scale": self.scale,
        }
