"""Digests of what tensors hold."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from ...runtime.ops.linear.stored_weight import StoredWeight

WHOLE_BYTES = 1 << 16
"""Parameters up to this size are read in full."""
_SAMPLES = 8
_SAMPLE_BYTES = 512


def tensor_digest(tensor: torch.Tensor) -> str:
    """A digest of all elements of a tensor."""
    digest = hashlib.sha256()
    update_whole(digest, tensor)
    return digest.hexdigest()


def contents_digest(model: nn.Module) -> str:
    """A digest of what the module's tensors hold, wherever in memory they are: samples of large parameters, all of
    the others."""
    digest = hashlib.sha256()
    known: set[int] = set()
    for name, tensor in module_tensors(model).items():
        if isinstance(tensor, StoredWeight):
            if id(tensor) not in known:
                known.add(id(tensor))
                digest.update(f"{name}\0{stored_digest(tensor)}\0".encode())
            continue
        if id(tensor) in known or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            continue
        known.add(id(tensor))
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if isinstance(tensor, nn.Parameter) and tensor.is_contiguous():
            update_samples(digest, tensor)
        else:
            update_whole(digest, tensor)
    return digest.hexdigest()


def stored_digest(weight: StoredWeight) -> str:
    """A digest of a weight as a checkpoint stores it: samples of its codes, all of its scales, zeros and order.

    The dtype that it is shown in does not count.
    """
    said = (str(weight.form), tuple(weight.shape), weight.transposed, weight.input_scale)
    digest = hashlib.sha256("".join(f"{entry}\0" for entry in said).encode())
    update_samples(digest, weight.codes.contiguous())
    for part in (weight.scales, weight.zeros, weight.order):
        digest.update(b"\0")
        if part is not None:
            update_whole(digest, part)
    return digest.hexdigest()


def module_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by qualified name; shared ones under each of their names."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    return named


def update_whole(digest: Any, tensor: torch.Tensor) -> None:
    """Feed a digest with all elements of a tensor."""
    digest.update(memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))


def update_samples(digest: Any, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Feed a digest with samples of a contiguous tensor, or with all of a small one.

    Args:
        digest: of ``hashlib``.
        tensor: it; of a large one little more than the samples is read.
        dtype: that its elements are converted to first.
    """
    dtype = tensor.dtype if dtype is None else dtype
    flat = tensor.detach().view(-1)
    if flat.numel() * dtype.itemsize <= WHOLE_BYTES:
        update_whole(digest, flat.to(dtype))
        return
    count = _SAMPLE_BYTES // dtype.itemsize
    step = (flat.numel() - count) // (_SAMPLES - 1)
    for i in range(_SAMPLES):
        update_whole(digest, flat[i * step : i * step + count].to(dtype))
