"""`pagoda::causal_conv1d` and `pagoda::causal_conv1d_seq`: short convolutions along the tokens of each sequence."""

from __future__ import annotations

import struct

import torch

from .native import FLOAT_CODES, kernel_function
from .registration import Facts, like_input, register_operator
from .state_slots import (
    FLOATS,
    SCHEMA,
    StateSlots,
    check_slots,
    kernel_takes,
    packed_slots,
    raise_failure,
    run_sequences,
    slots_of,
)

aten = torch.ops.aten

_TENSORS = "Tensor x, Tensor weight, Tensor? bias, str activation"
ACTIVATIONS = ("", "silu")
_MOST_TAPS = 8
# Field for field the struct ConvolutionArguments of csrc/causal_conv1d.cpp.
_ARGUMENTS = struct.Struct("=22q")


def causal_conv1d_seq_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """``activation(Σ_j weight[c, j] · x[t - K + 1 + j, c] + bias[c])`` of one sequence from its first token on.

    ``pagoda::causal_conv1d_seq``, the ``causal_conv1d_fn`` of Dao's package as transformers spells it: the sum and
    the activation are each rounded to the dtype of ``weight``.

    Args:
        x: ``[1, T, C]`` floating point; what stands before its first token counts as zero. Any strides.
        weight: ``[C, K]``, 2 <= K <= 8; the last tap meets the token itself.
        bias: ``[C]`` in the dtype of ``weight``, or None.
        activation: "silu", or "" for none.

    Returns:
        ``[1, T, C]`` in the dtype of ``x``, contiguous.

    Raises:
        ValueError: shapes, dtypes or an activation that do not fit.
    """
    check_convolution(x, weight, bias, activation)
    before = weight.new_zeros(weight.shape[1] - 1, weight.shape[0])
    result = x.new_empty(x.shape)
    result[0] = _convolve(x[0], weight, bias, activation, before)[0]
    return result


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    state: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_read: torch.Tensor,
    state_write: torch.Tensor,
) -> torch.Tensor:
    """:func:`causal_conv1d_seq_reference` for a step of sequences that go on: ``pagoda::causal_conv1d``.

    Args:
        x, weight, bias, activation: as there; x holds the tokens of all sequences, flat.
        state: ``[slots, K - 1, C]`` in the dtype of ``weight``: a sequence's last inputs, oldest first; written.
        query_start_loc, state_read, state_write: see ``state_slots``.

    Returns:
        ``[1, T, C]`` in the dtype of ``x``, contiguous; padding is zero.

    Raises:
        ValueError: what does not fit, or a slot that does not exist; nothing is written then.
    """
    slots = slots_of(state, query_start_loc, state_read, state_write)
    check_convolution(x, weight, bias, activation)
    _check_state(slots, weight)

    def run(tokens: slice, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _convolve(x[0, tokens], weight, bias, activation, before)

    return run_sequences(run, slots, x.new_zeros(x.shape), weight.dtype)


def causal_conv1d_seq_cpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """:func:`causal_conv1d_seq_reference` by the C++ kernel, for CPU tensors; else the reference."""
    check_convolution(x, weight, bias, activation)
    result = _run(None, x, weight, bias, activation)
    return causal_conv1d_seq_reference(x, weight, bias, activation) if result is None else result


def causal_conv1d_cpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, *where: torch.Tensor
) -> torch.Tensor:
    """:func:`causal_conv1d_reference` by the C++ kernel, for CPU tensors; else the reference.

    A token's result does not change by a bit with the other sequences, the number of threads, or the steps into which
    its sequence is cut.
    """
    slots = slots_of(*where)
    check_convolution(x, weight, bias, activation)
    _check_state(slots, weight)
    result = _run(slots, x, weight, bias, activation) if kernel_takes(slots) else None
    return causal_conv1d_reference(x, weight, bias, activation, *where) if result is None else result


def check_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
    """Raise ``ValueError`` unless the arguments are as :func:`causal_conv1d_seq_reference` says."""
    if x.dim() != 3 or x.shape[0] != 1 or weight.dim() != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit; make them [1, T, C] and [C, K]"
        )
    if not 2 <= weight.shape[1] <= _MOST_TAPS:
        raise ValueError(f"weight has {weight.shape[1]} taps; give 2 to {_MOST_TAPS}")
    if x.dtype not in FLOATS or weight.dtype not in FLOATS:
        raise ValueError(f"x and weight have dtypes {x.dtype} and {weight.dtype}; give floating-point numbers")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not weight.dtype):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}; make it [{weight.shape[0]}] {weight.dtype}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; give 'silu', or '' for none")


def _check_state(slots: StateSlots, weight: torch.Tensor) -> None:
    check_slots(slots, (weight.shape[1] - 1, weight.shape[0]), (weight.dtype,))


def _run(
    slots: StateSlots | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor | None:
    """The result; None where the kernel does not run."""
    kernel, code = kernel_function("pagoda_causal_conv1d"), FLOAT_CODES.get(weight.dtype)
    if kernel is None or code is None:
        return None
    inputs = x.to(weight.dtype)
    if inputs.stride(2) != 1:
        inputs = inputs.contiguous()
    result = inputs.new_empty(x.shape)
    _, tokens, channels = x.shape
    status = kernel(
        _ARGUMENTS.pack(
            inputs.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            result.data_ptr(),
            *packed_slots(slots),
            code,
            tokens,
            channels,
            weight.shape[1],
            inputs.stride(1),
            *weight.stride(),
            0 if bias is None else bias.stride(0),
            activation == "silu",
            torch.get_num_threads(),
        )
    )
    if status and slots is not None:
        raise_failure(status, slots, tokens)
    return result.to(x.dtype)


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results ``[n, C]`` for one sequence's inputs ``[n, C]``, and its last K - 1 inputs, given those before."""
    inputs = aten.cat([before, x.to(weight.dtype)])
    if not len(x):
        return x.new_empty(x.shape), before
    sums = aten.conv1d(inputs.T[None], weight[:, None], bias, groups=weight.shape[0])[0].T
    sums = aten.silu(sums) if activation else sums
    return sums.to(x.dtype), inputs[len(x) :]


causal_conv1d_seq = register_operator(
    f"causal_conv1d_seq({_TENSORS}) -> Tensor",
    Facts(over="all", invariant=True, kind="", spelled_out=False),
    fake=like_input,
    reference=causal_conv1d_seq_reference,
    cpu=causal_conv1d_seq_cpu,
)
causal_conv1d = register_operator(
    f"causal_conv1d({_TENSORS}, {SCHEMA}) -> Tensor",
    Facts(over="sequences", invariant=True, kind="", spelled_out=False),
    fake=like_input,
    reference=causal_conv1d_reference,
    cpu=causal_conv1d_cpu,
)
