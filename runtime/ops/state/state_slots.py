"""Operators with state: the slots that hold the states of a step's sequences, their checks, and the registration.

Operators with state take it and where it is as their last four arguments:

- ``state`` ``[slots, ...]``, written. A slot that no sequence of the step reads may hold anything, NaN included.
- ``query_start_loc`` ``[S + 1]`` int32: sequence s owns the tokens from ``query_start_loc[s]`` up to
  ``query_start_loc[s + 1]``. Tokens from ``query_start_loc[S]`` on are padding, whose result is zero.
- ``state_read`` ``[S]`` int32: slot of the state that the sequence goes on from; -1: it begins, from zeros.
- ``state_write`` ``[S]`` int32: slot that receives the state after the sequence's last token; -1: none. It may be the
  slot that is read; else that one keeps its content, and other sequences may read it, too. No slot is written that
  another sequence of the step reads or writes.

A sequence without tokens neither reads nor writes. All three are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..native import FLOAT_CODES
from ..registration import Facts, register_operator

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What the numbers of an operator with state may be."""
_SCHEMA = "Tensor(a!) state, Tensor query_start_loc, Tensor state_read, Tensor state_write"


class StateSlots(NamedTuple):
    """The last four arguments of an operator with state, as the module says."""

    state: torch.Tensor
    query_start_loc: torch.Tensor
    state_read: torch.Tensor
    state_write: torch.Tensor


class StateForm(NamedTuple):
    """The state of one sequence, as the arguments of an operator ask for it.

    Attributes:
        shape: its sizes.
        dtypes: that it may be kept in; the first one is that of the state which the reference computes with.
    """

    shape: Sequence[int]
    dtypes: Sequence[torch.dtype]


def register_with_state(
    name: str,
    tensors: str,
    *,
    result_like: int,
    check: Callable[..., StateForm],
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    kernel: Callable[..., tuple[int, torch.Tensor] | None],
) -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """Register ``pagoda::<name>_seq``, for one sequence from its first token, and ``pagoda::<name>``, for a step.

    A step is the flat tokens of sequences that go on; it takes the four arguments of :class:`StateSlots` behind the
    others, and the results of padding are zero. Either raises ``ValueError`` for arguments that do not fit and writes
    nothing then. On CPU a token's result does not change by a bit with the other sequences or the number of threads,
    nor, with a state that is kept in the dtype of the computation, with the steps into which its sequence is cut.

    Args:
        name: of the operator of a step.
        tensors: the arguments of both in the schema.
        result_like: index of the one, ``[1, T, ...]``, whose shape and dtype the result has; it is contiguous.
        check: the arguments → the state that they ask for; raises ``ValueError`` where they do not fit.
        reference: the arguments, a slice of the tokens, and the state of their sequence before them → their results
            ``[n, ...]`` and the state behind them.
        kernel: the checked slots, or None for one sequence that begins, and the arguments → the status of the C++
            kernel and the result; None where it does not run.
    """
    count = tensors.count(",") + 1

    def fake(*arguments: Any) -> torch.Tensor:
        value: torch.Tensor = arguments[result_like]
        return value.new_empty(value.shape)

    def run_reference(*arguments: Any) -> torch.Tensor:
        given, where = arguments[:count], arguments[count:]
        form = check(*given)
        value, dtype = given[result_like], form.dtypes[0]
        result: torch.Tensor = value.new_zeros(value.shape)
        if where:
            slots = checked_slots(form, *where)
            return run_sequences(lambda tokens, state: reference(*given, tokens, state), slots, result, dtype)
        result[0], _ = reference(*given, slice(0, value.shape[1]), value.new_zeros(form.shape, dtype=dtype))
        return result

    def run_cpu(*arguments: Any) -> torch.Tensor:
        given, where = arguments[:count], arguments[count:]
        form = check(*given)
        slots = checked_slots(form, *where) if where else None
        ran = kernel(slots, *given) if slots is None or kernel_takes(slots) else None
        if ran is None:
            return run_reference(*arguments)
        status, result = ran
        if status and slots is not None:
            raise_failure(status, slots, result.shape[1])
        return result

    run_cpu.__name__ = f"{name}_cpu"  # as the code of a graph shows it
    register = partial(register_operator, fake=fake, reference=run_reference, cpu=run_cpu)
    alone, flat = (Facts(over=over, invariant=True, kind="", spelled_out=False) for over in ("all", "sequences"))
    return (
        register(f"{name}_seq({tensors}) -> Tensor", alone),
        register(f"{name}({tensors}, {_SCHEMA}) -> Tensor", flat),
    )


def checked_slots(
    form: StateForm,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_read: torch.Tensor,
    state_write: torch.Tensor,
) -> StateSlots:
    """The last four arguments by name, the metadata contiguous as kernels read it.

    Shapes and dtypes are checked; ids and offsets are left to who follows them.

    Raises:
        ValueError: what does not fit, or not the state that the other arguments ask for.
    """
    unit_shape, dtypes = form
    starts, read, write = query_start_loc.contiguous(), state_read.contiguous(), state_write.contiguous()
    if state.dim() != len(unit_shape) + 1 or state.shape[1:] != tuple(unit_shape):
        raise ValueError(
            f"state has shape {tuple(state.shape)}; the other arguments ask for [slots, "
            f"{', '.join(map(str, unit_shape))}]"
        )
    if state.dtype not in dtypes:
        raise ValueError(f"state has dtype {state.dtype}; make it {' or '.join(map(str, dtypes))}")
    if read.dim() != 1 or write.shape != read.shape or starts.shape != (read.shape[0] + 1,):
        raise ValueError(
            f"query_start_loc {tuple(starts.shape)}, state_read {tuple(read.shape)} and state_write "
            f"{tuple(write.shape)} must be [S + 1], [S] and [S]"
        )
    if not starts.dtype is read.dtype is write.dtype is torch.int32:
        raise ValueError(
            f"query_start_loc, state_read and state_write have dtypes {starts.dtype}, {read.dtype} and "
            f"{write.dtype}; make them torch.int32"
        )
    return StateSlots(state, starts, read, write)


def recurrent_state(shape: Sequence[int], value: torch.Tensor) -> StateForm:
    """The state of a recurrence of ``value``: fp64 as that is, else computed in fp32, and kept so or in bf16."""
    computed = compute_dtype(value)
    return StateForm(shape, (computed,) if computed is torch.float64 else (computed, torch.bfloat16))


def compute_dtype(value: torch.Tensor) -> torch.dtype:
    """In which a recurrence of ``value`` is computed."""
    return torch.float64 if value.dtype is torch.float64 else torch.float32


def check_floats(**given: torch.Tensor | None) -> None:
    """Raise ``ValueError`` for an argument, passed by its name, that has no floating-point numbers; None has none."""
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {tensor.dtype}; give floating-point numbers")


def check_metadata(slots: StateSlots, tokens: int) -> None:
    """Check the ids and offsets themselves.

    Args:
        slots: whose shapes and dtypes have been checked.
        tokens: of the step.

    Raises:
        ValueError: offsets that do not start at 0, that fall, or that exceed the tokens; a slot that does not exist.
    """
    starts = slots.query_start_loc.tolist()
    last = 0
    for i, start in enumerate(starts):
        if start < last or start > tokens or (i == 0 and start):
            raise_offset(slots, i, tokens)
        last = start
    for name, ids in (("state_read", slots.state_read), ("state_write", slots.state_write)):
        for i, slot in enumerate(ids.tolist()):
            if not -1 <= slot < slots.state.shape[0]:
                raise_slot(slots, name, i)


def kernel_takes(slots: StateSlots) -> bool:
    """True if the state's dtype and layout are the kernels': each slot's elements next to each other."""
    state = slots.state
    return state.dtype in FLOAT_CODES and (state.is_contiguous() or state[0].is_contiguous())


def packed_slots(slots: StateSlots | None) -> tuple[int, ...]:
    """The fields of the struct StateSlots of csrc/state_slots.h, 8 integers.

    Args:
        slots: checked, the metadata contiguous; it must outlive the kernel's run. None: one sequence that begins.
    """
    if slots is None:
        return (0,) * 8
    state, starts, read, write = slots
    return (
        state.data_ptr(),
        starts.data_ptr(),
        read.data_ptr(),
        write.data_ptr(),
        FLOAT_CODES[state.dtype],
        state.shape[0],
        state.stride(0),
        read.shape[0],
    )


def raise_failure(status: int, slots: StateSlots, tokens: int) -> None:
    """Raise what a kernel's status (a code, and the index of the culprit above 8 bits) stands for."""
    code, index = status & 0xFF, status >> 8
    if code == 1:
        raise_offset(slots, index, tokens)
    raise_slot(slots, "state_read" if code == 2 else "state_write", index)


def raise_offset(slots: StateSlots, index: int, tokens: int) -> None:
    """Raise the ``ValueError`` for an offset that does not fit."""
    raise ValueError(
        f"query_start_loc[{index}] is {int(slots.query_start_loc[index])}; the offsets must start at 0, not fall and "
        f"not exceed the {tokens} tokens"
    )


def raise_slot(slots: StateSlots, name: str, index: int) -> None:
    """Raise the ``ValueError`` for a slot that does not exist."""
    raise ValueError(
        f"{name}[{index}] is {int(getattr(slots, name)[index])}; give -1, or one of the state's "
        f"{slots.state.shape[0]} slots"
    )


def run_sequences(
    run: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    slots: StateSlots,
    result: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Run every sequence of a step from its state to its state: the walk of the references.

    Args:
        run: tokens of one sequence and the state before them → the results ``[n, ...]`` and the state behind.
        slots: whose shapes and dtypes have been checked.
        result: ``[1, T, ...]`` of zeros.
        dtype: of the states that ``run`` takes.

    Returns:
        ``result``, filled in.

    Raises:
        ValueError: of :func:`check_metadata`; nothing is written then.
    """
    check_metadata(slots, result.shape[1])
    state, starts = slots.state, slots.query_start_loc.tolist()
    pairs = zip(slots.state_read.tolist(), slots.state_write.tolist(), strict=True)
    for sequence, (read, write) in enumerate(pairs):
        tokens = slice(starts[sequence], starts[sequence + 1])
        if tokens.start == tokens.stop:
            continue
        # Memory that holds no state yet is not multiplied by zero: it may hold NaN.
        before = state[read].to(dtype, copy=True) if read >= 0 else state.new_zeros(state.shape[1:], dtype=dtype)
        result[0, tokens], after = run(tokens, before)
        if write >= 0:
            state[write] = after.to(state.dtype)
    return result
