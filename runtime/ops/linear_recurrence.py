"""`pagoda::linear_recurrence` and `pagoda::linear_recurrence_seq`: attention without softmax, over a decaying state.

The gated delta rule (Qwen3.5, Kimi Linear), Mamba-2's state-space dual and lightning attention are each one of these.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from .native import FLOAT_CODES, kernel_function
from .registration import Facts, register_operator
from .state_slots import (
    SCHEMA,
    StateSlots,
    check_floats,
    check_recurrent_state,
    compute_dtype,
    kernel_takes,
    packed_slots,
    raise_failure,
    run_sequences,
    slots_of,
)

aten = torch.ops.aten

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor? beta, float scale, float? l2norm_eps"
# Field for field the struct RecurrenceArguments of csrc/linear_recurrence.cpp.
_ARGUMENTS = struct.Struct("=41q2d")


def linear_recurrence_seq_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
    l2norm_eps: float | None,
) -> torch.Tensor:
    """The recurrence of one sequence from its first token, ``pagoda::linear_recurrence_seq``.

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

    Returns:
        ``[1, T, Hv, P]`` in the dtype of ``value``, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_recurrence(query, key, value, log_decay, beta)
    before = value.new_zeros(_state_shape(key, value), dtype=compute_dtype(value))
    given = (query, key, value, log_decay, beta, scale, l2norm_eps)
    return _recur(*given, slice(0, value.shape[1]), before)[0][None]


def linear_recurrence_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
    l2norm_eps: float | None,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_read: torch.Tensor,
    state_write: torch.Tensor,
) -> torch.Tensor:
    """:func:`linear_recurrence_seq_reference` for a step of sequences that go on: ``pagoda::linear_recurrence``.

    Args:
        query, key, value, log_decay, beta, scale, l2norm_eps: as there, with the tokens of all sequences, flat.
        state: ``[slots, Hv, P, N]`` fp32, or bf16, to which it is rounded at the end of the step; written.
        query_start_loc, state_read, state_write: see ``state_slots``.

    Returns:
        ``[1, T, Hv, P]`` in the dtype of ``value``, contiguous; padding is zero.

    Raises:
        ValueError: what does not fit, or a slot that does not exist; nothing is written then.
    """
    slots = slots_of(state, query_start_loc, state_read, state_write)
    check_recurrence(query, key, value, log_decay, beta)
    check_recurrent_state(slots, _state_shape(key, value), value)

    def run(tokens: slice, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _recur(query, key, value, log_decay, beta, scale, l2norm_eps, tokens, before)

    return run_sequences(run, slots, value.new_zeros(value.shape), compute_dtype(value))


def linear_recurrence_seq_cpu(*arguments: Any) -> torch.Tensor:
    """:func:`linear_recurrence_seq_reference` by the C++ kernel, for CPU tensors; else the reference.

    Args:
        arguments: as the reference.
    """
    check_recurrence(*arguments[:5])
    result = _run(None, *arguments)
    return linear_recurrence_seq_reference(*arguments) if result is None else result


def linear_recurrence_cpu(*arguments: Any) -> torch.Tensor:
    """:func:`linear_recurrence_reference` by the C++ kernel, for CPU tensors; else the reference.

    A token's result does not change by a bit with the other sequences or the number of threads, nor, with a state of
    fp32, with the steps into which its sequence is cut.

    Args:
        arguments: as the reference.
    """
    given, slots = arguments[:-4], slots_of(*arguments[-4:])
    check_recurrence(*given[:5])
    check_recurrent_state(slots, _state_shape(*given[1:3]), given[2])
    result = _run(slots, *given) if kernel_takes(slots) else None
    return linear_recurrence_reference(*arguments) if result is None else result


def check_recurrence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor | None
) -> None:
    """Raise ``ValueError`` unless the arguments are as :func:`linear_recurrence_seq_reference` says."""
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


def _state_shape(key: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int]:
    return value.shape[2], value.shape[3], key.shape[3]


def _run(
    slots: StateSlots | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
    l2norm_eps: float | None,
) -> torch.Tensor | None:
    """The result; None where the kernel does not run."""
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
    if status and slots is not None:
        raise_failure(status, slots, tokens)
    return result


def _recur(
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
    """Results ``[n, Hv, P]`` for some tokens, and the state ``[Hv, P, N]`` behind them, given that before."""
    dtype = state.dtype
    queries, keys = (_normalised(x[0, tokens].to(dtype), l2norm_eps) for x in (query, key))
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


def _normalised(x: torch.Tensor, eps: float | None) -> torch.Tensor:
    return x if eps is None else x * aten.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _like_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return value.new_empty(value.shape)


linear_recurrence_seq = register_operator(
    f"linear_recurrence_seq({_TENSORS}) -> Tensor",
    Facts(over="all", invariant=True, kind="", spelled_out=False),
    fake=_like_value,
    reference=linear_recurrence_seq_reference,
    cpu=linear_recurrence_seq_cpu,
)
linear_recurrence = register_operator(
    f"linear_recurrence({_TENSORS}, {SCHEMA}) -> Tensor",
    Facts(over="sequences", invariant=True, kind="", spelled_out=False),
    fake=_like_value,
    reference=linear_recurrence_reference,
    cpu=linear_recurrence_cpu,
)
