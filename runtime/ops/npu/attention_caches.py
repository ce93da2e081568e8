"""Reads keys and values for the `npu::` attention operators: paged or not, int8 or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .numerics import widened


@dataclass(frozen=True)
class Scales:
    """Scales of int8 keys or values, which stand for ``(stored + offset) * scale``.

    ``mode`` and the shape of ``scale`` and ``offset`` (op-plugin, ``key_antiquant_mode``), L tokens or more:

    - 0: per channel ``(KN, 1, D)``, ``(KN, D)`` or ``(KN·D)``, each also with a leading 1; per tensor ``(1)``
    - 1: per token ``(B, L)`` or ``(1, B, L)``
    - 2: per head ``(KN)``
    - 3: per token and head ``(B, KN, L)``
    - 4: per token, paged ``(blocks, block size)``
    - 5: per token and head, paged ``(blocks, KN, block size)``
    """

    argument: str
    scale: torch.Tensor
    offset: torch.Tensor | None
    mode: int

    def applied(self, stored: torch.Tensor, sequence: int, blocks: torch.Tensor | None) -> torch.Tensor:
        """Numbers of one sequence. ``stored``: ``[KN, L, D]``; ``blocks``: its row of the block table."""
        wide = stored.float()
        if self.offset is not None:
            wide = wide + self._spread(self.offset, stored, sequence, blocks)
        return wide * self._spread(self.scale, stored, sequence, blocks)

    def _spread(
        self, values: torch.Tensor, stored: torch.Tensor, sequence: int, blocks: torch.Tensor | None
    ) -> torch.Tensor:
        heads, length, dim = stored.shape
        values = widened(values)
        if self.mode == 0 and values.numel() == 1:
            return values.reshape(1, 1, 1)
        if self.mode == 0 and values.numel() == heads * dim:
            return values.reshape(heads, 1, dim)
        if self.mode == 1 and values.dim() in (2, 3) and values[..., 0, :].numel() == values.shape[-1]:
            return values.reshape(values.shape[-2:])[sequence, :length].reshape(1, length, 1)
        if self.mode == 2 and values.numel() == heads:
            return values.reshape(heads, 1, 1)
        if self.mode == 3 and values.dim() == 3 and values.shape[1] == heads:
            return values[sequence, :, :length].unsqueeze(-1)
        if self.mode == 4 and values.dim() == 2 and blocks is not None:
            return values[blocks].reshape(-1)[:length].reshape(1, length, 1)
        if self.mode == 5 and values.dim() == 3 and values.shape[1] == heads and blocks is not None:
            return values[blocks].transpose(0, 1).flatten(1)[:, :length].unsqueeze(-1)
        raise ValueError(
            f"{self.argument} has shape {tuple(values.shape)}, which mode {self.mode} does not take for {heads} "
            f"key/value heads of size {dim} ({'paged' if blocks is not None else 'not paged'})"
        )


def read_paged(cache: torch.Tensor, blocks: torch.Tensor, length: int, kv_heads: int) -> torch.Tensor:
    """The first ``length`` tokens of a sequence, ``[KN, length, D]``; ``blocks`` are the ids of its blocks."""
    taken = cache[blocks]
    if cache.dim() == 3:
        return taken.flatten(0, 1)[:length].unflatten(1, (kv_heads, -1)).transpose(0, 1)
    if cache.dim() == 4:
        return taken.transpose(0, 1).flatten(1, 2)[:, :length]
    # [blocks, KN, columns, block size, width] -> [KN, blocks, block size, columns, width]
    return taken.permute(1, 0, 3, 2, 4).flatten(3, 4).flatten(1, 2)[:, :length]
