"""Operators with state in plain ATen operators with static shapes: the fallback of lowering on Ascend.

States of a step's sequences are gathered, computed on together, and returned for one write into the pool. Unlike the
operators themselves (``state_slots``) they ask that

- the step has no tokens behind those of its last sequence;
- every sequence writes a slot. One without tokens writes what it read.

Where things stand is read from tables (``state_tables``).
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def states_before(state: torch.Tensor, state_read: torch.Tensor) -> torch.Tensor:
    """The states that a step's sequences go on from, ``[S, ...]``; zeros for those that begin.

    Args:
        state: ``[slots, ...]``. Slots that nobody reads may hold anything, NaN included.
        state_read: ``[S]`` int32, see ``state_slots``.
    """
    rows = state.index_select(0, state_read.clamp(min=0))
    begins = (state_read < 0).view(-1, *[1] * (rows.dim() - 1))
    return rows.masked_fill(begins, 0.0)


def gathered_causal_conv1d(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    state: torch.Tensor,
    state_read: torch.Tensor,
    convolution_rows: torch.Tensor,
    kept_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of ``pagoda::causal_conv1d`` that leaves the pool of states alone.

    Sums are taken in fp32 and rounded to the dtype of ``state``, once. Memory: T * K * C elements in fp32.

    Args:
        x, bias, activation, state, state_read: of ``pagoda::causal_conv1d``.
        taps: ``[K, C]``, its weight, transposed, in float32 at least.
        convolution_rows: ``[T, K]`` int64, of ``state_tables.convolution_tables``.
        kept_rows: ``[S, K - 1]`` int64, likewise.

    Returns:
        ``[1, T, C]`` in the dtype of ``x``, and the states behind the step's tokens, ``[S, K - 1, C]``.
    """
    count, channels = taps.shape
    before = state.index_select(0, state_read.clamp(min=0)).reshape(-1, channels)
    rows = aten.cat(
        [before, x.reshape(-1, channels).to(state.dtype), taps.new_zeros((1, channels), dtype=state.dtype)]
    )
    windows = rows.index_select(0, convolution_rows.reshape(-1)).reshape(-1, count, channels)
    sums = (windows * taps).sum(1)
    if bias is not None:
        sums = sums + bias
    result = sums.to(state.dtype)
    if activation:
        result = aten.silu(result)
    after = rows.index_select(0, kept_rows.reshape(-1)).reshape(-1, count - 1, channels)
    return result.to(x.dtype)[None], after
