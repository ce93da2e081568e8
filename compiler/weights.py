"""Notice when a module's weights are no longer the ones that its program was compiled with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class WeightGuard:
    """Remembers where every parameter and buffer of ``model`` lives.

    A program reads the tensors that the module had when it was compiled. Values may change in place (an optimiser
    step, ``copy_``); a tensor that was replaced or moved would silently be ignored, so that raises instead.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {name: (id(tensor), _place(tensor)) for name, tensor in _tensors(model)}

    def check(self) -> None:
        """Compare with what the module holds now.

        Raises:
            RuntimeError: a parameter or buffer was replaced, moved, converted, added or removed.
        """
        now = {name: (id(tensor), _place(tensor)) for name, tensor in _tensors(self._model)}
        if now == self._known:
            return
        changed = next(name for name in {**self._known, **now} if now.get(name) != self._known.get(name))
        raise RuntimeError(
            f"{changed!r} of {type(self._model).__name__} was replaced or moved after the model was compiled "
            "(.to(), load_state_dict(assign=True), an adapter); compile it again"
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.device]:
    return tensor.data_ptr(), tensor.dtype, tensor.device
