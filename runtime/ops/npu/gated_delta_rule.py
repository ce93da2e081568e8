"""CPU semantics of the gated delta rule: `npu_chunk_gated_delta_rule` and `npu_recurrent_gated_delta_rule`.

Yang et al. 2024. A value head keeps a matrix S ``[Dv, Dk]``; value head h reads key head ``h // (Nv // Nk)``.
Each token does::

    S = S · exp(g)                                  # of the head; gk: of each key channel
    S = S + beta · (value - S key) keyᵀ
    result = S (query · scale)

Keys and queries come normalized. Both compute in fp32 and round at the end, states as well.
"""

from __future__ import annotations

import torch

from .limits.states import MAX_RECURRENT_TOKENS
from .numerics import widened
from .registration import Operator


def npu_chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    actual_seq_lengths: torch.Tensor | None,
    scale: float | None,
    g: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule over the tokens of sequences, one after the other, each from a state of its own.

    Args:
        query, key: ``[T, Nk, Dk]``.
        value: ``[T, Nv, Dv]``, Nv a multiple of Nk.
        beta: ``[T, Nv]``; needed.
        initial_state: ``[B, Nv, Dv, Dk]``; needed.
        actual_seq_lengths: ``[B]`` int32, tokens of each sequence, T together; needed.
        scale: of the queries; None for 1.
        g: ``[T, Nv]`` fp32, logarithms of decays; None for none.

    Returns:
        ``[T, Nv, Dv]`` in the dtype of ``value``, and the states behind the sequences, like ``initial_state``.

    Raises:
        ValueError: shapes, dtypes or lengths that do not fit.
    """
    assert beta is not None and initial_state is not None and actual_seq_lengths is not None
    counts = actual_seq_lengths.tolist()
    if len(counts) != len(initial_state) or min(counts, default=0) < 0 or sum(counts) != len(value):
        raise ValueError(
            f"actual_seq_lengths is {counts}; it must be {len(initial_state)} lengths of {len(value)} tokens together"
        )
    result, final = torch.empty_like(value), torch.empty_like(initial_state)
    first = 0
    for sequence, count in enumerate(counts):
        state = widened(initial_state[sequence])
        for t in range(first, first + count):
            state, result[t] = _token(
                state, query[t], key[t], value[t], beta[t], 1.0 if scale is None else scale, g, t
            )
        final[sequence] = state
        first += count
    return result, final


def _chunk_fake(value: torch.Tensor, initial_state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert initial_state is not None
    return torch.empty_like(value), torch.empty_like(initial_state)


def npu_recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float | None,
    actual_seq_lengths: torch.Tensor | None,
    ssm_state_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
) -> torch.Tensor:
    """The rule over a few tokens of each sequence, with the state after every token kept in a slot of its own.

    A sequence goes on from the slot of the last of its tokens that were accepted of the step before.

    Args:
        query, key, value: as in :func:`npu_chunk_gated_delta_rule`.
        state: ``[slots, Nv, Dv, Dk]``; written.
        beta: ``[T, Nv]``; needed.
        scale: of the queries; None for ``Dk ** -0.5``.
        actual_seq_lengths: ``[B]`` int32, tokens of each sequence; needed.
        ssm_state_indices: ``[T]`` int32, the slot that takes the state after each token; needed.
        num_accepted_tokens: ``[B]`` int32: the sequence goes on from the slot of its token of that number, counted
            from 1; None for 1.
        g: ``[T, Nv]`` fp32, logarithms of decays; None for none.
        gk: ``[T, Nv, Dk]`` fp32, the same of each key channel.

    Returns:
        ``[T, Nv, Dv]`` in the dtype of ``value``.

    Raises:
        ValueError: shapes, dtypes, lengths or slots that do not fit.
    """
    assert beta is not None and actual_seq_lengths is not None and ssm_state_indices is not None
    counts, slots = actual_seq_lengths.tolist(), ssm_state_indices.tolist()
    accepted = [1] * len(counts) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    if min(counts, default=1) < 1 or max(counts, default=1) > MAX_RECURRENT_TOKENS or sum(counts) != len(value):
        raise ValueError(
            f"actual_seq_lengths is {counts}; give 1 to {MAX_RECURRENT_TOKENS} tokens, {len(value)} together"
        )
    if len(slots) != len(value) or not all(0 <= slot < len(state) for slot in slots):
        raise ValueError(f"ssm_state_indices is {slots}; give {len(value)} of the {len(state)} slots")
    if len(accepted) != len(counts) or any(not 1 <= n <= count for n, count in zip(accepted, counts, strict=True)):
        raise ValueError(f"num_accepted_tokens is {accepted}; give each of {counts} one of its tokens")
    result = torch.empty_like(value)
    factor = query.shape[2] ** -0.5 if scale is None else scale
    first = 0
    for count, last in zip(counts, accepted, strict=True):
        current = widened(state[slots[first + last - 1]]).clone()
        for t in range(first, first + count):
            if gk is not None:
                current = current * torch.exp(widened(gk[t]))[:, None, :]
            current, result[t] = _token(current, query[t], key[t], value[t], beta[t], factor, g, t)
            state[slots[t]] = current.to(state.dtype)
        first += count
    return result


def _recurrent_fake(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


def _token(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    g: torch.Tensor | None,
    t: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state ``[Nv, Dv, Dk]`` behind a token, and its result ``[Nv, Dv]``."""
    groups = value.shape[0] // key.shape[0]
    q, k = (widened(x).repeat_interleave(groups, 0) for x in (query, key))
    if g is not None:
        state = state * torch.exp(widened(g[t]))[:, None, None]
    written = (widened(value) - (state @ k[:, :, None])[:, :, 0]) * widened(beta)[:, None]
    state = state + written[:, :, None] * k[:, None, :]
    return state, (state @ (q * scale)[:, :, None])[:, :, 0].to(value.dtype)


OPERATORS = (
    Operator("npu_chunk_gated_delta_rule", npu_chunk_gated_delta_rule, _chunk_fake),
    Operator(
        "npu_recurrent_gated_delta_rule",
        npu_recurrent_gated_delta_rule,
        _recurrent_fake,
        "npu_recurrent_gated_delta_rule_functional",
    ),
)
