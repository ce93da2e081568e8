"""Quantizes a matrix to 4 bits with the least change of a layer's outputs, rather than of its weights.

A row ``w`` of the matrix becomes ``v = s q``: integers ``q`` from -8 to 7, and a scale ``s`` for each group of
inputs. Over calibration inputs ``x`` the squared error of the output is ``(w - v) H (w - v)`` with ``H = sum x x'``.
Three steps lower it:

1. GPTQ (Frantar et al. 2022, arXiv:2210.17323) rounds one input after the other, those with the largest inputs first,
and moves the rounding error to the remaining inputs. Scales are fixed before.
2. With ``q`` fixed the error is quadratic in the scales: the best ones solve a small linear system for each row.
3. With the scales fixed, each number in turn moves to its best value, given all others (coordinate descent, as in
QuantEase, Behdin et al. 2023, arXiv:2309.01885).

The last two never raise the error and are repeated a few times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ...runtime.ops.linear.quantized_weight import search_scales

LEAST, MOST = -8, 7
_BLOCK = 128


@dataclass(frozen=True)
class GridWeight:
    """A matrix of integers and scales.

    Attributes:
        whole: ``[out, in]`` float32, numbers from -8 to 7.
        scales: ``[out, groups]`` float32.
        group_size: inputs that share a scale; the last group may have fewer.
    """

    whole: torch.Tensor
    scales: torch.Tensor
    group_size: int

    def dense(self) -> torch.Tensor:
        """The matrix ``[out, in]`` that they stand for."""
        return self.whole * self.scale_of_inputs()

    def scale_of_inputs(self) -> torch.Tensor:
        """``[out, in]``."""
        return self.scales.repeat_interleave(self.group_size, 1)[:, : self.whole.shape[1]]


def output_error(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    """Squared error of a layer's outputs over all calibration inputs: ``[out, in]`` twice, ``[in, in]``."""
    error = weight - rounded
    return float(((error @ hessian) * error).sum())


def damped(hessian: torch.Tensor, share: float) -> torch.Tensor:
    """The matrix ``[in, in]`` with a share of its mean diagonal added to its diagonal, so that it has an inverse."""
    result = hessian.clone()
    mean = float(result.diagonal().mean())
    result.diagonal().add_(share * mean if mean > 0 else 1.0)
    return result


def first_scales(weight: torch.Tensor, group_size: int, importance: torch.Tensor) -> torch.Tensor:
    """Return the scales ``[out, groups]`` with the smallest round-to-nearest error.

    Args:
        weight: ``[out, in]`` float32.
        group_size: inputs that share a scale.
        importance: ``[in]``, what the squared error of an input's numbers counts.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // group_size)
    spare = groups * group_size - inputs
    numbers = F.pad(weight, (0, spare)).view(outputs, groups, group_size)
    far = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))
    is_zero = far.abs() < 1e-30
    counts = F.pad(importance, (0, spare)).view(groups, group_size)
    _, scales = search_scales(numbers, torch.where(is_zero, 1.0, far), counts)
    return torch.where(is_zero, 0.0, scales)[..., 0]


def round_in_turn(weight: torch.Tensor, hessian: torch.Tensor, grid: GridWeight) -> GridWeight:
    """GPTQ: round one input after the other, and let those to come make up for the error.

    Args:
        weight: ``[out, in]`` float32.
        hessian: ``[in, in]`` float32, positive definite.
        grid: its scales are used, its numbers are not.
    """
    inputs = weight.shape[1]
    order = hessian.diagonal().argsort(descending=True)
    factor = torch.linalg.cholesky(hessian[order][:, order])
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    rest, scales = weight[:, order], grid.scale_of_inputs()[:, order]
    whole = torch.zeros_like(rest)
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        errors = torch.zeros_like(rest[:, begin:end])
        for i in range(begin, end):
            whole[:, i] = _nearest(rest[:, i], scales[:, i])
            error = (rest[:, i] - whole[:, i] * scales[:, i]) / inverse[i, i]
            rest[:, i:end] -= error[:, None] * inverse[i, i:end]
            errors[:, i - begin] = error
        rest[:, end:] -= errors @ inverse[begin:end, end:]
    return GridWeight(whole[:, order.argsort()], grid.scales, grid.group_size)


def fit_scales(weight: torch.Tensor, hessian: torch.Tensor, grid: GridWeight) -> GridWeight:
    """The same integers with the scales that make the outputs' error least."""
    outputs, inputs = weight.shape
    size, groups = grid.group_size, grid.scales.shape[1]
    spare = groups * size - inputs
    whole = F.pad(grid.whole, (0, spare)).view(outputs, groups, size)
    wanted = F.pad(weight @ hessian, (0, spare)).view(outputs, groups, size)
    right = (whole * wanted).sum(-1)
    left = torch.empty(outputs, groups, groups)
    for g in range(groups):
        part = grid.whole[:, g * size : (g + 1) * size] @ hessian[g * size : (g + 1) * size]
        left[:, g] = (F.pad(part, (0, spare)).view(outputs, groups, size) * whole).sum(-1)
    # A group of zeros has no best scale; any keeps the system solvable.
    diagonal = left.diagonal(dim1=1, dim2=2)
    diagonal += 1e-6 * diagonal.mean(1, keepdim=True) + 1e-30
    return GridWeight(grid.whole, torch.linalg.solve(left, right), size)


def descend(weight: torch.Tensor, hessian: torch.Tensor, grid: GridWeight) -> GridWeight:
    """Move each number in turn to its best grid point, given all others; the scales stay fixed."""
    inputs = weight.shape[1]
    scales, whole = grid.scale_of_inputs(), grid.whole.clone()
    pull = (weight - whole * scales) @ hessian
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        near, before = pull[:, begin:end].clone(), whole[:, begin:end].clone()
        for i in range(begin, end):
            now = whole[:, i] * scales[:, i]
            whole[:, i] = _nearest(now + near[:, i - begin] / hessian[i, i], scales[:, i])
            near -= (whole[:, i] * scales[:, i] - now)[:, None] * hessian[i, begin:end]
        pull -= ((whole[:, begin:end] - before) * scales[:, begin:end]) @ hessian[begin:end]
    return GridWeight(whole, grid.scales, grid.group_size)


def _nearest(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    usable = scales != 0
    return torch.where(usable, numbers / torch.where(usable, scales, 1.0), 0.0).round().clamp(LEAST, MOST)


def stretch(grid: GridWeight) -> GridWeight:
    """Give groups whose farthest number is nearer than 7 a finer scale, so that it is 7.

    Rounding to nearest (``runtime.ops.quantized_weight``) looks for the farthest number around 8 only. It finds the
    same numbers again where that is 7 or -8.
    """
    outputs, inputs = grid.whole.shape
    size, groups = grid.group_size, grid.scales.shape[1]
    whole = F.pad(grid.whole, (0, groups * size - inputs)).view(outputs, groups, size)
    far = whole.abs().amax(-1)
    is_near = (far > 0) & (far < MOST)
    factor = torch.where(is_near, MOST / far.clamp_min(1), 1.0)
    stretched = (whole * factor[..., None]).round().view(outputs, -1)[:, :inputs]
    return GridWeight(stretched, grid.scales / factor, size)


def round_to_grid(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    group_size: int,
    rounds: int = 4,
    *,
    scale_dtype: torch.dtype | None = None,
) -> GridWeight:
    """Round a matrix so that the layer's outputs change least over the calibration inputs.

    Args:
        weight: ``[out, in]`` float32.
        hessian: ``[in, in]`` float32, the sum of ``x x'`` over inputs; positive definite, see :func:`damped`.
        group_size: inputs that share a scale; 0: all.
        rounds: how often scales and numbers are fitted to each other.
        scale_dtype: that the scales are rounded to, none of them 0, before the numbers are fitted to them once more;
            None: they stay float32, and each group reaches 7 or -8.
    """
    size = group_size or weight.shape[1]
    scales = first_scales(weight, size, hessian.diagonal())
    grid = round_in_turn(weight, hessian, GridWeight(torch.zeros_like(weight), scales, size))
    for _ in range(rounds):
        grid = descend(weight, hessian, fit_scales(weight, hessian, grid))
    if scale_dtype is None:
        return stretch(grid)
    least = float(torch.finfo(scale_dtype).tiny)
    sizes = grid.scales.abs().clamp(least, float(torch.finfo(scale_dtype).max))
    scales = torch.where(grid.scales < 0, -sizes, sizes).to(scale_dtype).float()
    return descend(weight, hessian, GridWeight(grid.whole, scales, size))
