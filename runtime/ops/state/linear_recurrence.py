"""`pagoda::linear_recurrence` and `pagoda::linear_recurrence_seq`: attention without softmax, over a decaying state.

The gated delta rule (Qwen3.5, Kimi Linear), Mamba-2's state-space dual and lightning attention are each one of these.
"""

from __future__ import annotations

import struct

import torch

from ..native import FLOAT_CODES, kernel_function
from .state_slots import StateForm, StateSlots, check_floats, packed_slots, recurrent_state, register_with_state

aten = torch.ops.aten

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor? beta, float scale, float? l2norm_eps"
# Field for field the struct RecurrenceArguments of csrc/linear_recurrence.cpp.
_ARGUMENTS = struct.Struct("=41q2d")


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    *_: object,
) -> StateForm:
    """Raise ``ValueError`` unless the arguments are as :func:`recurrence` says; the state that they ask for."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    fits = query.dim() == 4 and value.dim() == 4 and key.shape == query.shape and query.shape[0] == 1
    if not fits or value.shape[:2] != key.shape[:2] or not key.shape[2] or value.shape[2] % key.shape[2]:
        raise ValueError(
            f"{shapes} do not fit; make them [1, T, Hk, N], [1, T, Hk, N], [1, T, Hv, P], Hk dividing Hv"
        )
    per_head = value.shape[:3]
    if log_decay.shape not in (per_head, (*per_head, key.shape[3]), per_head[2:]):
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}; make it {tuple(per_head)}, {(*per_head, key.shape[3])} "
            f"or {tuple(per_head[2:])}"
        )
    if beta is not None and beta.shape != per_head:
        raise ValueError(f"beta has shape {tuple(beta.shape)}; make it {tuple(per_head)}, or give none")
    check_floats(query=query, key=key, value=value, log_decay=log_decay, beta=beta)
    return recurrent_state((*value.shape[2:], key.shape[3]), value)


def _run(
    slots: StateSlots | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
    l2norm_eps: float | None,
) -> tuple[int, torch.Tensor] | None:
    """The status of the C++ kernel and the result; None where it does not run."""
    kernel = kernel_function("pagoda_linear_recurrence")
    given = (query, key, value, log_decay, value if beta is None else beta)
    codes = [FLOAT_CODES.get(tensor.dtype) for tensor in given]
    if kernel is None or None in codes:
        return None
    result = value.new_empty(value.shape)
    _, tokens, key_heads, dim = key.shape
    by_channel = log_decay.dim() == 4
    decay_strides = (0, log_decay.stride(0)) if log_decay.dim() == 1 else log_decay.stride()[1:]
    status = kernel(
        _ARGUMENTS.pack(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            log_decay.data_ptr(),
            0 if beta is None else beta.data_ptr(),
            result.data_ptr(),
            *packed_slots(slots),
            *codes,
            tokens,
            key_heads,
            value.shape[2],
            dim,
            value.shape[3],
            *query.stride()[1:],
            *key.stride()[1:],
            *value.stride()[1:],
            *decay_strides,
            *(() if by_channel else (0,)),
            *((0, 0) if beta is None else beta.stride()[1:]),
            by_channel,
            l2norm_eps is not None,
            torch.get_num_threads(),
            scale,
            l2norm_eps or 0.0,
        )
    )
    return status, result


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
    l2norm_eps: float | None,
    tokens: slice,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over some tokens of one sequence: the reference of both operators.

    A value head keeps a matrix S ``[P, N]``, zero at first. Each token decays it, writes, and reads::

        S = S · exp(log_decay)                     # of the head, or of each key channel (column)
        S = S + beta · (value - S key) keyᵀ        # the delta rule (Yang et al. 2024), if there is a beta
        S = S + value keyᵀ                         # else (Mamba-2, Dao & Gu 2024; lightning attention)
        result = scale · S query

    Mamba-2: query is C, key is B, value is ``dt · x`` and log_decay ``A · dt``. Computed token by token, in fp32 (in
    fp64 if value is).

    Args:
        query: ``[1, T, Hk, N]`` floating point, like all that follow. Any strides, in all arguments.
        key: ``[1, T, Hk, N]``.
        value: ``[1, T, Hv, P]``, Hv a multiple of Hk; value head h reads query and key head ``h // (Hv // Hk)``.
        log_decay: ``[1, T, Hv]``, ``[1, T, Hv, N]`` (Kimi delta attention), or ``[Hv]`` for all tokens alike.
        beta: ``[1, T, Hv]``, or None.
        scale: of the results.
        l2norm_eps: if given, query and key become ``x · rsqrt(Σ x² + l2norm_eps)`` in each head first.
        tokens: of all T, those to run.
        state: S in front of them, ``[Hv, P, N]``. A step keeps it in fp32, or in bf16, to which it is rounded at the
            end of the step.

    Returns:
        Results ``[n, Hv, P]`` in the dtype of ``value``, and the state behind them.
    """
    dtype = state.dtype
    queries, keys = (_normalized(x[0, tokens].to(dtype), l2norm_eps) for x in (query, key))
    queries = (queries * scale).repeat_interleave(value.shape[2] // key.shape[2], 1)
    keys = keys.repeat_interleave(value.shape[2] // key.shape[2], 1)
    values = value[0, tokens].to(dtype)
    decay = aten.exp(log_decay.to(dtype))
    decay = decay.expand(len(values), -1) if decay.dim() == 1 else decay[0, tokens]
    decay = decay[:, :, None, :] if decay.dim() == 3 else decay[:, :, None, None]
    betas = None if beta is None else beta[0, tokens].to(dtype)
    results = torch.empty_like(values)
    for i, (q, k, written) in enumerate(zip(queries, keys, values, strict=True)):
        state = state * decay[i]
        if betas is not None:
            written = (written - (state @ k[:, :, None])[:, :, 0]) * betas[i, :, None]
        state = state + written[:, :, None] * k[:, None, :]
        results[i] = (state @ q[:, :, None])[:, :, 0]
    return results.to(value.dtype), state


def _normalized(x: torch.Tensor, eps: float | None) -> torch.Tensor:
    return x if eps is None else x * aten.rsqrt((x * x).sum(-1, keepdim=True) + eps)


linear_recurrence_seq, linear_recurrence = register_with_state(
    "linear_recurrence", _TENSORS, result_like=2, check=_check, reference=recurrence, kernel=_run
)
