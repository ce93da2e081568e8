"""`pagoda::causal_conv1d` and `pagoda::causal_conv1d_seq`: short convolutions along the tokens of each sequence."""

from __future__ import annotations

import struct

import torch

from ..native import FLOAT_CODES, kernel_function
from .state_slots import FLOATS, StateForm, StateSlots, packed_slots, register_with_state

aten = torch.ops.aten

_TENSORS = "Tensor x, Tensor weight, Tensor? bias, str activation"
ACTIVATIONS = ("", "silu")
_MOST_TAPS = 8
# Field for field the struct ConvolutionArguments of csrc/causal_conv1d.cpp.
_ARGUMENTS = struct.Struct("=22q")


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> StateForm:
    """Raise ``ValueError`` unless the arguments are as :func:`convolution` says; the state that they ask for."""
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
    return StateForm((weight.shape[1] - 1, weight.shape[0]), (weight.dtype,))


def _run(
    slots: StateSlots | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> tuple[int, torch.Tensor] | None:
    """The status of the C++ kernel and the result; None where it does not run."""
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
    return status, result.to(x.dtype)


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    tokens: slice,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``activation(Σ_j weight[c, j] · x[t - K + 1 + j, c] + bias[c])`` for some tokens of one sequence.

    The reference of both operators: the ``causal_conv1d_fn`` of Dao's package as transformers spells it. The sum and
    the activation are each rounded to the dtype of ``weight``.

    Args:
        x: ``[1, T, C]`` floating point; what stands before a sequence's first token counts as zero. Any strides.
        weight: ``[C, K]``, 2 <= K <= 8; the last tap meets the token itself.
        bias: ``[C]`` in the dtype of ``weight``, or None.
        activation: "silu", or "" for none.
        tokens: of all T, those to run.
        state: ``[K - 1, C]`` in the dtype of ``weight``: the sequence's inputs in front of them, oldest first.

    Returns:
        Results ``[n, C]`` in the dtype of ``x``, and the state behind them.
    """
    x = x[0, tokens]
    inputs = aten.cat([state, x.to(weight.dtype)])
    if not len(x):
        return x.new_empty(x.shape), state
    sums = aten.conv1d(inputs.T[None], weight[:, None], bias, groups=weight.shape[0])[0].T
    sums = aten.silu(sums) if activation else sums
    return sums.to(x.dtype), inputs[len(x) :]


causal_conv1d_seq, causal_conv1d = register_with_state(
    "causal_conv1d", _TENSORS, result_like=0, check=_check, reference=convolution, kernel=_run
)
