"""Keys selected by an indexer for each token, as positions and as a mask."""

from __future__ import annotations

import torch

NO_KEY = -1
"""Entry of a token that sees fewer keys than may be chosen."""


def mask_of_selected(selected: torch.Tensor, num_keys: int) -> torch.Tensor:
    """``[T, num_keys]`` bool, True where a key was chosen.

    Args:
        selected: ``[1, T, K]`` int32 or int64 positions of keys; ``NO_KEY`` stands for none.
        num_keys: how many keys there are.

    Raises:
        ValueError: an entry is not a position of a key.
    """
    chosen = selected[0].long()
    if bool(((chosen >= num_keys) | (chosen < NO_KEY)).any()):
        raise ValueError(
            f"selected holds positions from {int(chosen.min())} to {int(chosen.max())} of {num_keys} keys"
        )
    mask = torch.zeros(chosen.shape[0], num_keys + 1, dtype=torch.bool, device=chosen.device)
    mask.scatter_(1, chosen.where(chosen >= 0, num_keys), True)
    return mask[:, :num_keys]


def check_selected(selected: torch.Tensor | None, batch: int, tokens: int) -> None:
    """Raise ``ValueError`` unless ``selected`` is None or ``[1, tokens, K]`` integers, for a batch of one."""
    if selected is None:
        return
    if batch != 1 or selected.dim() != 3 or selected.shape[:2] != (1, tokens):
        raise ValueError(f"selected has shape {tuple(selected.shape)}; make it [1, {tokens}, K], for a batch of one")
    if selected.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"selected has dtype {selected.dtype}; make it int32")
