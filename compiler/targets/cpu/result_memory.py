"""Memory at fixed addresses for results of operators that are called repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class ResultMemory:
    """Pieces of memory that stay where they are; one is taken again when what lay there is of no use any more."""

    def __init__(self) -> None:
        self._pieces: dict[int, torch.Tensor] = {}  # by address
        self._free: dict[int, list[torch.Tensor]] = {}  # by size

    def __contains__(self, address: int) -> bool:
        return address in self._pieces

    def take(self, size: int) -> torch.Tensor:
        """At least ``size`` bytes."""
        size = 1 << max(6, (size - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        with torch.inference_mode(False):
            piece = torch.empty(size, dtype=torch.uint8)
        self._pieces[piece.data_ptr()] = piece
        return piece

    def give(self, address: int) -> None:
        """Nothing of use lies there any more."""
        piece = self._pieces[address]
        self._free[piece.numel()].append(piece)

    def take_back_all(self) -> None:
        """Nothing of use lies anywhere."""
        self._free = {}
        for piece in self._pieces.values():
            self._free.setdefault(piece.numel(), []).append(piece)


class ResultWatch(TorchDispatchMode):
    """Lets new tensors lie in pieces of memory, and sees whether torch computes anything.

    Attributes:
        computes: whether it did more than allocate and view.
        taken: addresses of the pieces.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing Dynamo, which it would call to leave this mode's calls untraced: nothing here is
        traced, and a start from the store has no other use for it."""
        return False

    def __init__(self, memory: ResultMemory) -> None:
        super().__init__()
        self._memory = memory
        self.computes = False
        self.taken: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _ALLOCATIONS:
            # contiguous, to and reshape count as views, and copy where they must.
            self.computes |= not (func.is_view and _same_memory(found, args[0]))
            return found
        size = found.untyped_storage().nbytes()
        piece = self._memory.take(size)
        self.taken.append(piece.data_ptr())
        return piece[:size].view(found.dtype).as_strided(found.size(), found.stride())


def _same_memory(found: Any, given: Any) -> bool:
    """True if all tensors of a result lie where an argument lies."""
    results = found if isinstance(found, list | tuple) else (found,)
    return isinstance(given, torch.Tensor) and all(
        isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        for result in results
    )
