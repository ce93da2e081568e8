"""Weights in panels of outputs, ``[panels, in / 2, panel, 2]``: the layout for packed products."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from ...memory import advise_huge_pages
from ..native import kernel_function

aten = torch.ops.aten

STEP = 32
"""Inputs are padded to a multiple of it."""
SIZES = (16, 32, 64)
"""Outputs that a panel may have."""
_ARGUMENTS = struct.Struct("=7q")  # LayOutArguments in csrc/weight_panels.cpp


def lay_out(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """``[panels, in / 2, panel, 2]``: an ``[out, in]`` weight in panels, padded with zeros to 32 inputs."""
    return lay_out_rows([weight], panel)


def lay_out_rows(weights: Sequence[torch.Tensor], panel: int) -> torch.Tensor:
    """:func:`lay_out` of the weight whose rows are those of ``weights``, one after the other."""
    if any(len(rows) % panel for rows in weights[:-1]):  # a panel holds rows of two of them
        weights = [torch.cat(list(weights))]
    outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
    panels, pairs = -(-outputs // panel), -(-inputs // STEP) * STEP // 2
    laid = weights[0].new_empty(panels, pairs, panel, 2)
    advise_huge_pages(laid)
    first = 0
    for rows in weights:
        last = first - (-len(rows) // panel)
        _lay_out_into(laid[first:last], rows)
        first = last
    return laid


def _lay_out_into(laid: torch.Tensor, weight: torch.Tensor) -> None:
    panels, pairs, panel, _ = laid.shape
    outputs, inputs = weight.shape
    kernel = kernel_function("pagoda_lay_out_panels") if laid.element_size() == 2 and weight.stride(1) == 1 else None
    if kernel is not None:
        sizes = (outputs, inputs, weight.stride(0), panel)
        if not kernel(_ARGUMENTS.pack(weight.data_ptr(), laid.data_ptr(), *sizes, torch.get_num_threads())):
            return
    padded = aten.pad(weight, (0, pairs * 2 - inputs, 0, panels * panel - outputs))
    laid.copy_(padded.view(panels, panel, pairs, 2).transpose(1, 2))
