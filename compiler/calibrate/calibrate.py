"""Quantizes a causal LM's weights to 4 bits layer by layer, calibrated on sample text.

Each layer is calibrated on its real inputs: hidden states from the quantized layers before it. Its targets are the
float model's, so that it also compensates their errors: of all matrices ``v``, ``w X C`` has the least ``|v x - w
x*|``, with ``x`` from the quantized and ``x*`` from the float model, where ``X`` is the sum of ``x* x'`` and ``C``
the inverse of the sum of ``x x'``. That one is quantized (see ``grid.py``).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...runtime.ops.linear.quantized_weight import Quantization, check_group_size, restored_weight, round_weight
from .decoder_layers import LayerCall, Matrix, decoder_layers, first_call, input_of, matrices_by_input
from .grid import GridWeight, damped, output_error, round_to_grid
from .recorded_grid import record_grid

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

DAMPING = 0.01
"""Share of the mean diagonal that is added to sums of ``x x'``, as in GPTQ."""


@dataclass(frozen=True)
class CalibratedMatrix:
    """The outcome for one matrix.

    Attributes:
        name: of its module in the model.
        error: mean squared error of its outputs over the calibration text, relative to the outputs themselves.
        nearest_error: the same error if each weight were rounded to the nearest grid point.
    """

    name: str
    error: float
    nearest_error: float


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    windows: torch.Tensor,
    group_size: int,
    *,
    batch_size: int = 8,
    on_layer: Callable[[int, int], None] | None = None,
    on_matrix: Callable[[str, GridWeight], None] | None = None,
) -> list[CalibratedMatrix]:
    """Quantize the matrices of the decoder layers to a 4-bit grid, in place.

    The model keeps its dtype: its numbers are integers from -8 to 7 times the scale of their group, up to the
    rounding of that dtype. ``quantization="int4"`` restores these integers, as the model's config records the grid
    (see ``recorded_grid.py``). Embeddings, norms, biases and the head are unchanged; so are matrices outside of
    ``nn.Linear`` and ``Conv1D``, such as stacked experts, and those that the first batch does not use.

    Args:
        model: in eval mode, in a float dtype.
        windows: token ids of sample text, ``[N, L]`` int64. Use more tokens than a matrix has inputs, better many
            times more.
        group_size: inputs that share a scale, a multiple of 64; 0: all.
        batch_size: windows per batch.
        on_layer: called with the number of finished layers, and of all layers.
        on_matrix: called with the name of each module and its numbers, which are then kept exactly: the scales have
            the model's dtype, and the config does not record the grid.

    Returns:
        The result for each matrix, in the order of use.

    Raises:
        ValueError: an unsupported group size, windows that are not token ids, or a model whose layers are not a
            sequence.
    """
    check_group_size(group_size)
    if windows.dim() != 2 or windows.dtype != torch.int64 or not windows.numel():
        raise ValueError(
            f"windows is {windows.dtype} of shape {list(windows.shape)}; pass int64 token ids [windows, tokens]"
        )
    layers = decoder_layers(model)
    names = {module: name for name, module in model.named_modules()}
    calls = [first_call(model, layers, ids) for ids in windows.split(batch_size)]
    float_hidden = [call.hidden for call in calls]
    found = []
    for index, layer in enumerate(layers):
        float_layer = copy.deepcopy(layer)
        float_calls = [LayerCall(hidden, call.others) for hidden, call in zip(float_hidden, calls, strict=True)]
        for group in matrices_by_input(layer, index, calls[0]):
            sums = _input_sums(layer, float_layer, index, calls, float_calls, group[0].name)
            for matrix in group:
                found.append(_round(matrix, f"{names[layer]}.{matrix.name}", *sums, group_size, on_matrix))
        for i, call in enumerate(calls):
            float_hidden[i] = float_calls[i].run(float_layer, index)
            call.hidden = call.run(layer, index)
        if on_layer is not None:
            on_layer(index + 1, len(layers))
    if on_matrix is None:
        record_grid(model.config, group_size)
    return found


def _input_sums(
    layer: nn.Module,
    float_layer: nn.Module,
    index: int,
    calls: Sequence[LayerCall],
    float_calls: Sequence[LayerCall],
    name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over all tokens of ``x x'`` and of ``x* x'``, each ``[in, in]`` float32.

    Where tokens go to experts the two models may send them apart; then ``x`` stands for both.
    """
    own, cross = torch.zeros(()), torch.zeros(())
    for call, float_call in zip(calls, float_calls, strict=True):
        x, right = input_of(layer, index, call, name), input_of(float_layer, index, float_call, name)
        if len(x):
            own = own + x.T @ x
            cross = cross + (right if right.shape == x.shape else x).T @ x
    return own, cross


def _round(
    matrix: Matrix,
    name: str,
    own: torch.Tensor,
    cross: torch.Tensor,
    group_size: int,
    on_matrix: Callable[[str, GridWeight], None] | None,
) -> CalibratedMatrix:
    weight = matrix.read()
    hessian = damped(own, DAMPING)
    target = weight + torch.linalg.solve(hessian, (weight @ (cross - own)).T).T
    if on_matrix is None:
        rounded = round_to_grid(target, hessian, group_size).dense()
    else:
        grid = round_to_grid(target, hessian, group_size, scale_dtype=matrix.dtype)
        on_matrix(name, grid)
        rounded = grid.dense()
    matrix.write(rounded)
    scheme = Quantization(4, group_size, input_bits=16)
    nearest = restored_weight(*round_weight(weight, scheme), scheme)
    size = max(output_error(target, torch.zeros_like(target), own), 1e-30)
    result = CalibratedMatrix(
        name, output_error(target, rounded, own) / size, output_error(target, nearest, own) / size
    )
    logger.info("%s: error %.2g, to nearest %.2g", name, result.error, result.nearest_error)
    return result
