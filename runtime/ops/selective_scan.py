"""`pagoda::selective_scan` and `pagoda::selective_scan_seq`: the state-space recurrence of Mamba-1."""

from __future__ import annotations

import struct
from typing import Any

import torch

from .native import FLOAT_CODES, kernel_function
from .registration import Facts, like_input, register_operator
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

_TENSORS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, bool round_state"
# Field for field the struct ScanArguments of csrc/selective_scan.cpp.
_ARGUMENTS = struct.Struct("=34q")


def selective_scan_seq_reference(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, round_state: bool
) -> torch.Tensor:
    """The scan of one sequence from its first token, ``pagoda::selective_scan_seq`` (Gu & Dao 2023).

    A channel keeps N numbers S, zero at first. Each token does::

        S = exp(A · dt) · S + dt · B · x
        result = S · C                             # summed over N

    in fp32 (in fp64 if x is). The skip ``D · x``, the gate z, and the bias and softplus of dt are outside.

    Args:
        x: ``[1, T, E]`` floating point, like all that follow. Any strides, in all arguments.
        dt: ``[1, T, E]``.
        A: ``[E, N]``.
        B: ``[1, T, N]``.
        C: ``[1, T, N]``.
        round_state: S is rounded to the dtype of ``x`` where it meets C, as in transformers; what is kept is not.

    Returns:
        ``[1, T, E]`` in the dtype of ``x``, contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_scan(x, dt, A, B, C)
    before = x.new_zeros(A.shape, dtype=compute_dtype(x))
    return _scan(x, dt, A, B, C, round_state, slice(0, x.shape[1]), before)[0][None]


def selective_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    round_state: bool,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_read: torch.Tensor,
    state_write: torch.Tensor,
) -> torch.Tensor:
    """:func:`selective_scan_seq_reference` for a step of sequences that go on: ``pagoda::selective_scan``.

    Args:
        x, dt, A, B, C, round_state: as there, with the tokens of all sequences, flat.
        state: ``[slots, E, N]`` fp32, or bf16, to which it is rounded at the end of the step; written.
        query_start_loc, state_read, state_write: see ``state_slots``.

    Returns:
        ``[1, T, E]`` in the dtype of ``x``, contiguous; padding is zero.

    Raises:
        ValueError: what does not fit, or a slot that does not exist; nothing is written then.
    """
    slots = slots_of(state, query_start_loc, state_read, state_write)
    check_scan(x, dt, A, B, C)
    check_recurrent_state(slots, A.shape, x)

    def run(tokens: slice, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _scan(x, dt, A, B, C, round_state, tokens, before)

    return run_sequences(run, slots, x.new_zeros(x.shape), compute_dtype(x))


def selective_scan_seq_cpu(*arguments: Any) -> torch.Tensor:
    """:func:`selective_scan_seq_reference` by the C++ kernel, for CPU tensors; else the reference.

    Args:
        arguments: as the reference.
    """
    check_scan(*arguments[:5])
    result = _run(None, *arguments)
    return selective_scan_seq_reference(*arguments) if result is None else result


def selective_scan_cpu(*arguments: Any) -> torch.Tensor:
    """:func:`selective_scan_reference` by the C++ kernel, for CPU tensors; else the reference.

    A token's result does not change by a bit with the other sequences or the number of threads, nor, with a state of
    fp32, with the steps into which its sequence is cut.

    Args:
        arguments: as the reference.
    """
    given, slots = arguments[:-4], slots_of(*arguments[-4:])
    check_scan(*given[:5])
    check_recurrent_state(slots, given[2].shape, given[0])
    result = _run(slots, *given) if kernel_takes(slots) else None
    return selective_scan_reference(*arguments) if result is None else result


def check_scan(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> None:
    """Raise ``ValueError`` unless the arguments are as :func:`selective_scan_seq_reference` says."""
    fits = x.dim() == 3 and x.shape[0] == 1 and dt.shape == x.shape and A.dim() == 2 and A.shape[0] == x.shape[2]
    if not fits:
        raise ValueError(
            f"x {tuple(x.shape)}, dt {tuple(dt.shape)} and A {tuple(A.shape)} do not fit; make them [1, T, E], "
            "[1, T, E] and [E, N]"
        )
    shape = (1, x.shape[1], A.shape[1])
    if B.shape != shape or C.shape != shape:
        raise ValueError(f"B {tuple(B.shape)} and C {tuple(C.shape)} must be {tuple(shape)}, as x and A are")
    check_floats(x=x, dt=dt, A=A, B=B, C=C)


def _run(
    slots: StateSlots | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    round_state: bool,
) -> torch.Tensor | None:
    """The result; None where the kernel does not run."""
    kernel = kernel_function("pagoda_selective_scan")
    codes = [FLOAT_CODES.get(tensor.dtype) for tensor in (x, dt, A, B, C)]
    if kernel is None or None in codes:
        return None
    result = x.new_empty(x.shape)
    status = kernel(
        _ARGUMENTS.pack(
            x.data_ptr(),
            dt.data_ptr(),
            A.data_ptr(),
            B.data_ptr(),
            C.data_ptr(),
            result.data_ptr(),
            *packed_slots(slots),
            *codes,
            x.shape[1],
            *A.shape,
            *x.stride()[1:],
            *dt.stride()[1:],
            *A.stride(),
            *B.stride()[1:],
            *C.stride()[1:],
            round_state,
            torch.get_num_threads(),
        )
    )
    if status and slots is not None:
        raise_failure(status, slots, x.shape[1])
    return result


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    round_state: bool,
    tokens: slice,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results ``[n, E]`` for some tokens, and the state ``[E, N]`` behind them, given that before."""
    dtype = state.dtype
    inputs, steps, writes, reads = (tensor[0, tokens].to(dtype) for tensor in (x, dt, B, C))
    rates = A.to(dtype)
    results = torch.empty_like(inputs)
    for i, step in enumerate(steps):
        step = step[:, None]
        state = aten.exp(rates * step) * state + step * writes[i] * inputs[i, :, None]
        seen = state.to(x.dtype).to(dtype) if round_state else state
        results[i] = seen @ reads[i]
    return results.to(x.dtype), state


selective_scan_seq = register_operator(
    f"selective_scan_seq({_TENSORS}) -> Tensor",
    Facts(over="all", invariant=True, kind="", spelled_out=False),
    fake=like_input,
    reference=selective_scan_seq_reference,
    cpu=selective_scan_seq_cpu,
)
selective_scan = register_operator(
    f"selective_scan({_TENSORS}, {SCHEMA}) -> Tensor",
    Facts(over="sequences", invariant=True, kind="", spelled_out=False),
    fake=like_input,
    reference=selective_scan_reference,
    cpu=selective_scan_cpu,
)
