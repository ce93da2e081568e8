"""Notice when a module's weights are no longer the ones that its program was compiled with."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch._C._dynamo.guards import dict_version

Place = tuple[int, torch.dtype, torch.device]
"""Where a tensor's elements are and what they are."""

_guards: weakref.WeakSet[WeightGuard] = weakref.WeakSet()


class WeightGuard:
    """Remembers where every parameter and buffer of ``model`` lives.

    A program reads the tensors that the module had when it was compiled. Values may change in place (an optimizer
    step, ``copy_``); a tensor that was replaced or moved would silently be ignored, so that raises instead, and so
    does an in-place change of one that the program holds a copy of, constants computed from, or numbers read off (a
    scale, the table of a mask). (Writes through ``.data`` go unseen.)

    Args:
        model: the module that was compiled.
        copied: its tensors that the program does not read itself (packed weights, what constants were computed from).
        merged: its tensors that the program reads as rows of a merged one.
    """

    def __init__(
        self, model: nn.Module, copied: Iterable[torch.Tensor] = (), merged: Iterable[torch.Tensor] = ()
    ) -> None:
        self._model = model
        self._known = self._now()
        self._tensors = [tensor for _, tensor in _tensors(model)]
        dicts = [d for m in model.modules() for d in (m._parameters, m._buffers, m._modules)]
        self._dicts, self._empty = [d for d in dicts if d], [d for d in dicts if not d]
        self._quick = self._glance()
        self._copied = [(tensor, tensor._version) for tensor in copied if not tensor.is_inference()]
        self._merged = {id(tensor) for tensor in merged}
        self._writes = self._count_writes()
        _guards.add(self)

    def check(self) -> None:
        """Compare with what the module holds now.

        Raises:
            RuntimeError: a parameter or buffer was replaced, moved, converted, added or removed; or one that is
                packed was written to.
        """
        glance = self._glance()
        if glance != self._quick:
            self._check_places()
            self._quick = glance
        for tensor, version in self._copied:
            if tensor._version != version:
                name = next((name for name, other in _tensors(self._model) if other is tensor), "a tensor")
                raise RuntimeError(
                    f"{name!r} of {type(self._model).__name__} was written to after the model was compiled, and the "
                    "program has a packed copy of it or constants computed from it; recompile the model"
                )

    def _check_places(self) -> None:
        now = self._now()
        if now != self._known:
            changed = next(name for name in {**self._known, **now} if now.get(name) != self._known.get(name))
            raise RuntimeError(
                f"{changed!r} of {type(self._model).__name__} was replaced or moved after the model was compiled "
                "(.to(), load_state_dict(assign=True), an adapter); recompile it"
            )

    def written_since_last_time(self) -> bool:
        """True if any tensor was written to in place since the last call, or since this was made."""
        before, self._writes = self._writes, self._count_writes()
        return before != self._writes

    def follow(self, moves: Mapping[int, tuple[Place, Place]]) -> None:
        """Accept that tensors (by ``id``) moved to another location with their values.

        Do not accept moves of tensors that the program reads as rows of a merged one: it would still read the old
        location.
        """
        for name, (identity, place) in self._known.items():
            before, after = moves.get(identity, (None, place))
            if place == before and identity not in self._merged:
                self._known[name] = (identity, after)

    def _count_writes(self) -> int:
        return sum(tensor._version for tensor in self._tensors if not tensor.is_inference())

    def _glance(self) -> tuple[list[int], list[int], bool]:
        """A value that changes when a tensor is replaced, added or moved."""
        places = [tensor.data_ptr() for tensor in self._tensors]
        return list(map(dict_version, self._dicts)), places, any(self._empty)

    def _now(self) -> dict[str, tuple[int, Place]]:
        return {name: (id(tensor), place_of(tensor)) for name, tensor in _tensors(self._model)}


def weights_moved(moves: Mapping[int, tuple[Place, Place]]) -> None:
    """Notify all guards that weights were merged: tensor (by ``id``) → its location before and after."""
    if moves:
        for guard in list(_guards):
            guard.follow(moves)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def place_of(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.dtype, tensor.device
