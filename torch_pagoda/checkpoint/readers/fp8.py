"""Reads FP8 with scales per block, as DeepSeek and Qwen store it."""

from __future__ import annotations

import torch

from .compressed_tensors import in_blocks
from .parts import Quantized

_OF_INPUTS = frozenset(("activation_scale", "activation_scale_inv", "input_scale"))
_UNREAD = _OF_INPUTS | {"output_scale", "k_scale", "v_scale"}
LEAVES = _OF_INPUTS | {"weight_scale_inv", "weight_scale"}
"""``weight_scale_inv`` multiplies, despite its name. Activations and caches stay in the model's own dtype."""


def read_fp8(module: Quantized) -> dict[str, torch.Tensor]:
    """Return the weight of ``weight`` e4m3 ``[out, in]`` and ``weight_scale_inv``.

    Raises:
        BadTensor: a tensor is missing or has a wrong shape.
    """
    weight = module.take("weight")
    module.ignore(*_UNREAD)
    leaf = "weight_scale_inv" if "weight_scale_inv" in module.tensors else "weight_scale"
    if weight.dtype is not torch.float8_e4m3fn and leaf not in module.tensors:
        return {f"{module.name}.{other}": module.take(other) for other in module.tensors if other not in _UNREAD}
    module.take("weight", torch.float8_e4m3fn, dim=2)
    scales = module.take(leaf)
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.float()
        module.check_scales(leaf, scales)
    else:
        scales = module.scales(leaf, dim=None)
    found = in_blocks(module, weight, scales, leaf, module.settings.get("weight_block_size"))
    return {f"{module.name}.weight": found, **module.rest}
