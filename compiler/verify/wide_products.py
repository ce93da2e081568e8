"""Linear layers in half precision on processors without instructions for it: computed in float32, rounded once.

torch multiplies bf16 there at a fourth of the speed at which oneDNN multiplies float32: with AVX2 at 22 GFLOP/s, not
80. Both add up in float32 and round the sum.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...runtime.ops.linear.stored_weight import StoredWeight, as_dense

AT_ONCE = 2 << 20
"""Bytes in float32 of a weight that is made some rows at a time: what is larger leaves the caches before it is read,
and its memory goes back to the system, which clears it for the next rows."""
_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")


@functools.cache
def widens(dtype: torch.dtype) -> bool:
    """Whether products in ``dtype`` are faster in float32 on this processor."""
    if not _ONEDNN:
        return False
    if dtype is torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, where it is fastest. On x86 oneDNN multiplies float32: MKL, which torch would
    call, is half as fast on AMD processors."""
    if _can_widen(x, weight, bias):
        return _in_float32(x, weight, bias)
    if _ONEDNN and x.dtype is weight.dtype is torch.float32 and weight.is_contiguous():
        return _multiply(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


class WideProducts(TorchFunctionMode):
    """Computes a module's linear layers by ``linear`` in half precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs and _can_widen(*args):
            return _in_float32(*args)
        return func(*args, **(kwargs or {}))


def _can_widen(x: Any, weight: Any, bias: Any = None) -> bool:
    if not widens(x.dtype) or x.dtype is not weight.dtype or {x.device.type, weight.device.type} != {"cpu"}:
        return False
    if weight.dim() != 2 or not weight.numel() or (bias is not None and bias.shape != weight.shape[:1]):
        return False
    return type(x) is torch.Tensor and not (isinstance(weight, StoredWeight) and weight.transposed)


def _in_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    wide = x.float()
    added = None if bias is None else bias.float()
    parts, count = [], max(1, AT_ONCE // (4 * weight.shape[1]))
    for first in range(0, len(weight), count):
        at = slice(first, first + count)
        rows = as_dense(weight.detach()[at]).float()
        parts.append(_multiply(wide, rows, None if added is None else added[at]).to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.contiguous(), bias, "none", [], "")
    return product
