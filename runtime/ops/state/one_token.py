"""Operators with state for steps of one token per sequence, in ATen operators of static kind, for Ascend.

They are the formulas of ``causal_conv1d``, ``linear_recurrence`` and ``selective_scan`` without the loop over tokens:
token t goes on from slot ``state_read[t]``, which is there (no sequence begins), and leaves the pool of states
alone.
"""

from __future__ import annotations

import torch

from .state_slots import compute_dtype

aten = torch.ops.aten


def one_token_conv1d(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    state: torch.Tensor,
    state_read: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of ``pagoda::causal_conv1d``.

    Args:
        x, bias, activation: of the operator.
        taps: ``[K, C]``, its weight, transposed, in float32 at least.
        state: ``[slots, K - 1, C]`` in the dtype of its weight.
        state_read: ``[T]`` int32.

    Returns:
        ``[1, T, C]`` in the dtype of ``x``, and the states behind the tokens, ``[T, K - 1, C]``.
    """
    before = state.index_select(0, state_read)
    window = aten.cat([before, x.reshape(-1, 1, x.shape[2]).to(state.dtype)], 1)
    sums = (window * taps).sum(1)
    if bias is not None:
        sums = sums + bias
    result = sums.to(state.dtype)
    if activation:
        result = aten.silu(result)
    return result.to(x.dtype)[None], window[:, 1:].contiguous()


def one_token_recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    state_read: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of ``pagoda::linear_recurrence``.

    Args:
        query, key: ``[T, Hk, N]`` in the dtype that is computed in, normalized and scaled.
        value: ``[T, Hv, P]`` in the same.
        log_decay, beta: of the operator.
        state: ``[slots, Hv, P, N]``.
        state_read: ``[T]`` int32.

    Returns:
        ``[T, Hv, P]``, and the states behind the tokens, ``[T, Hv, P, N]`` in the dtype of ``state``.
    """
    _, key_heads, channels = key.shape
    rows = value.shape[1] // key_heads * value.shape[2]
    decay = aten.exp(log_decay.to(value.dtype)).reshape(-1, value.shape[1], 1, (1, channels)[log_decay.dim() == 4])
    held = state.index_select(0, state_read).to(value.dtype) * decay
    written = value.reshape(-1, key_heads, rows, 1)
    if beta is not None:
        seen = aten.bmm(held.reshape(-1, rows, channels), key.reshape(-1, channels, 1))
        missing = value - seen.reshape(-1, value.shape[1], value.shape[2])
        written = (missing * beta.reshape(-1, value.shape[1], 1)).reshape(-1, key_heads, rows, 1)
    after = aten.addcmul(
        held.reshape(-1, key_heads, rows, channels), written, key.reshape(-1, key_heads, 1, channels)
    )
    result = aten.bmm(after.reshape(-1, rows, channels), query.reshape(-1, channels, 1))
    shape = value.shape[1], value.shape[2]
    return result.reshape(-1, *shape), after.reshape(-1, *shape, channels).to(state.dtype)


def one_token_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    round_state: bool,
    state: torch.Tensor,
    state_read: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of ``pagoda::selective_scan``.

    Args:
        x, dt, A, B, C, round_state: of the operator.
        state: ``[slots, E, N]``.
        state_read: ``[T]`` int32.

    Returns:
        ``[1, T, E]`` in the dtype of ``x``, and the states behind the tokens, ``[T, E, N]`` in that of ``state``.
    """
    wide = compute_dtype(x)
    steps = dt.to(wide).reshape(-1, dt.shape[2], 1)
    inputs = steps * x.to(wide).reshape(-1, x.shape[2], 1)
    held = state.index_select(0, state_read).to(wide) * aten.exp(steps * A.to(wide))
    after = aten.addcmul(held, inputs, B.to(wide).reshape(-1, 1, B.shape[2]))
    seen = after.to(x.dtype).to(wide) if round_state else after
    result = aten.bmm(seen, C.to(wide).reshape(-1, C.shape[2], 1))
    return result.reshape(1, -1, x.shape[2]).to(x.dtype), after.to(state.dtype)
