"""What linking makes of weights that products of Ascend read in 8 bits: whole numbers and scales."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....passes import UnsupportedModel
from ....passes.graph.notes import QuantizedInputs
from ....runtime.ops.quantized_weight import Quantization, round_weight
from ....runtime.ops.stored_weight import StoredWeight

_SAMPLED = 64
"""Outputs at the beginning and at the end of a matrix that are looked at."""
_MOST_OFF = {8: 0.51, 4: 2.2}
"""Scales by which an entry may be off: half of one, and where that loses less in all, what 4 bits cut off."""
_AS_STORED = 1e-3
"""Likewise, of the largest entry, of weights that a checkpoint stores in scales that are kept."""


def make_inputs(weight: torch.Tensor, inputs: QuantizedInputs) -> dict[str, torch.Tensor]:
    """The tensors of ``inputs``, by name.

    Args:
        weight: ``[out, in]`` or what ``QuantizedInputs.source`` says, of floats or stored.
        inputs: what is to be made of it.
    """
    if weight.dim() == 3:
        parts = [make_inputs(matrix, replace(inputs, turned=True)) for matrix in weight.detach().unbind(0)]
        return {name: torch.stack([part[name] for part in parts]) for name in inputs.made}
    matrix = weight.detach().transpose(0, 1) if inputs.turned else weight.detach()
    if isinstance(matrix, StoredWeight):
        numbers, scales = _stored_numbers(matrix)
    else:
        numbers, scales = _rounded(matrix, inputs.quantization, inputs.scale_dtype)
    return {
        inputs.numbers: numbers.transpose(0, 1).contiguous(),
        inputs.scales: scales.to(inputs.scale_dtype).flatten().contiguous(),
    }


def _stored_numbers(weight: StoredWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a weight ``[out, in]`` with a scale for each output: signed bytes, and the scales ``[out, 1]``."""
    return (weight.codes.view(torch.int8) ^ -128), weight.scales


def _rounded(
    matrix: torch.Tensor, quantization: Quantization, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers ``[out, in]`` and scales ``[out, groups]`` as they are kept, which the numbers are right for."""
    numbers, scales = round_weight(matrix, quantization)
    if scale_dtype is torch.float32:
        return numbers, scales
    kept = scales.to(scale_dtype)
    wide = kept.float()
    numbers = torch.where(wide > 0, matrix.float() / wide, 0.0).round().clamp(-127, 127).to(torch.int8)
    return numbers, kept


def check_inputs(weight: torch.Tensor, inputs: QuantizedInputs, made: dict[str, torch.Tensor]) -> None:
    """Compare the first and the last outputs of what was made of a weight with it.

    Args:
        weight: as it was.
        inputs: what was to be made of it.
        made: what ``make_inputs`` returned.

    Raises:
        UnsupportedModel: an entry is farther off than rounding explains.
    """
    numbers, scales = made[inputs.numbers], made[inputs.scales]
    if weight.dim() == 3:
        for expert in {0, len(weight) - 1}:
            parts = {name: tensor[expert] for name, tensor in made.items()}
            check_inputs(weight[expert], replace(inputs, turned=True), parts)
        return
    outputs = numbers.shape[1]
    plain = weight.detach().transpose(0, 1) if inputs.turned else weight.detach()
    for first in {0, max(0, outputs - _SAMPLED)}:
        some = slice(first, first + _SAMPLED)
        rows = plain[some]
        exact = rows.replaced(dtype=torch.float32).dense() if isinstance(rows, StoredWeight) else rows.float()
        if not exact.isfinite().all():
            continue  # NaN in, NaN out
        unit = scales[some].float()[:, None]
        off = (numbers[:, some].t().float() * unit - exact).abs()
        most = (
            exact.abs() * _kept(inputs.scale_dtype) if inputs.stored else _MOST_OFF[inputs.quantization.bits] * unit
        )
        wrong = int((off > most + 1e-30).sum())
        if wrong:
            raise UnsupportedModel(
                f"{wrong} entries of the weight {inputs.source!r} are wrong when it is rounded to "
                f"{inputs.quantization.bits} bits; please report it. verify='off' serves it regardless"
            )


def _kept(dtype: torch.dtype) -> float:
    """What storing a number in a dtype may change of it."""
    return _AS_STORED if dtype is torch.float32 else 2.0 * torch.finfo(dtype).eps
