"""What one model step needs to know beside its tokens: where KV goes, where it is read, which rows are asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepMetadata:
    """Tensors that describe one flat step of T tokens from S sequences; R of the tokens ask for logits.

    Attributes:
        slot_mapping: ``[T]`` int64. Cache slot (``block * block_size + offset``) of each token; -1 for padding.
        block_table: ``[S, W]`` int32. Block ids of each sequence, in order; entries past its length are ignored.
        query_start_loc: ``[S + 1]`` int32. Sequence s owns tokens ``query_start_loc[s]:query_start_loc[s + 1]``.
        seq_lens: ``[S]`` int32. Context length of each sequence, this step's tokens included.
        logits_rows: ``[R]`` int64. Indices of the tokens whose logits are returned.
        token_lengths: ``[T]`` int64. For each token, the length that its sequence has when it is run alone and
            with a cache: ``max(prompt length, position + 1)``. It does not depend on how the scheduler cut the
            prompt into chunks; models whose position encoding depends on the length read it (longrope). A
            sequence that was computed anew (``Program.restart_length``) counts what it had then as its prompt.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    logits_rows: torch.Tensor
    token_lengths: torch.Tensor
