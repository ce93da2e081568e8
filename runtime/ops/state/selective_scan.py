"""`pagoda::selective_scan` and `pagoda::selective_scan_seq`: the state-space recurrence of Mamba-1."""

from __future__ import annotations

import struct

import torch

from ..native import FLOAT_CODES, kernel_function
from .state_slots import StateForm, StateSlots, check_floats, packed_slots, recurrent_state, register_with_state

aten = torch.ops.aten

_TENSORS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, bool round_state"
# Field for field the struct ScanArguments of csrc/selective_scan.cpp.
_ARGUMENTS = struct.Struct("=34q")


def _check(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, round_state: bool
) -> StateForm:
    """Raise ``ValueError`` unless the arguments are as :func:`scan` says; the state that they ask for."""
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
    return recurrent_state(A.shape, x)


def _run(
    slots: StateSlots | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    round_state: bool,
) -> tuple[int, torch.Tensor] | None:
    """The status of the C++ kernel and the result; None where it does not run."""
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
    return status, result


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    round_state: bool,
    tokens: slice,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of some tokens of one sequence (Gu & Dao 2023): the reference of both operators.

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
        tokens: of all T, those to run.
        state: S in front of them, ``[E, N]``. A step keeps it in fp32, or in bf16, to which it is rounded at the end
            of the step.

    Returns:
        Results ``[n, E]`` in the dtype of ``x``, and the state behind them.
    """
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


selective_scan_seq, selective_scan = register_with_state(
    "selective_scan", _TENSORS, result_like=0, check=_check, reference=scan, kernel=_run
)
