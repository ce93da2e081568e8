"""Weights in panels of outputs, ``[panels, in / 2, panel, 2]``: how packed products read them."""

from __future__ import annotations

import struct

import torch
from torch.nn import functional as F

from ..memory import advise_huge_pages
from .native import kernel_function

STEP = 32
"""Inputs are padded to a multiple of it."""
SIZES = (16, 32, 64)
"""Outputs that a panel may have."""
_ARGUMENTS = struct.Struct("=7q")  # LayOutArguments in csrc/weight_panels.cpp


def lay_out(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """``[panels, in / 2, panel, 2]``: an ``[out, in]`` weight in panels, padded with zeros to 32 inputs."""
    outputs, inputs = weight.shape
    panels, pairs = -(-outputs // panel), -(-inputs // STEP) * STEP // 2
    laid = weight.new_empty(panels, pairs, panel, 2)
    advise_huge_pages(laid)
    kernel = kernel_function("pagoda_lay_out_panels") if laid.element_size() == 2 and weight.stride(1) == 1 else None
    if kernel is not None:
        sizes = (outputs, inputs, weight.stride(0), panel)
        if not kernel(_ARGUMENTS.pack(weight.data_ptr(), laid.data_ptr(), *sizes, torch.get_num_threads())):
            return laid
    padded = F.pad(weight, (0, pairs * 2 - inputs, 0, panels * panel - outputs))
    return laid.copy_(padded.view(panels, panel, pairs, 2).transpose(1, 2))
