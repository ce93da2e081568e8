"""Handles buffers that a forward reassigns (``self.table = self.table.to(x.dtype)``) while a model is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def plain_buffers(model: nn.Module) -> Iterator[None]:
    """Let a model's ``nn.Buffer`` be buffers like those of ``register_buffer`` for a while.

    ``Module.__setattr__`` reads an ``nn.Buffer``'s own ``persistent``, which Dynamo (torch 2.13) cannot; of others it
    asks the module. One thread at a time may trace a model.
    """
    marked: list[torch.Tensor] = []
    try:
        for buffer in model.buffers():
            if getattr(buffer, "_is_buffer", False):
                marked.append(buffer)
                buffer._is_buffer = False  # type: ignore[attr-defined]
        yield
    finally:
        for buffer in marked:
            buffer._is_buffer = True  # type: ignore[attr-defined]
