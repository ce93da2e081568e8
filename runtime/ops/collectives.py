"""`pagoda::all_reduce` and `pagoda::all_gather`: tensors that the ranks of a group exchange."""

from __future__ import annotations

from typing import Protocol

import torch

from .registration import Facts, like_input, register_operator

GROUP = "tensor_parallel"
"""The name that graphs give the group of the ranks that hold one layer together."""


class ParallelGroup(Protocol):
    """The ranks that run one program together.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        name: by which graphs name the group.
    """

    rank: int
    size: int
    name: str

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``x``: added in the order of the ranks in float32, the same bits on all of them."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``, beside each other in the order of the ranks along the last dim."""


_groups: dict[str, ParallelGroup] = {}
_changes = 0


def set_group(group: ParallelGroup) -> None:
    """Let the operators of this process use ``group`` wherever a graph names it."""
    global _changes
    _groups[group.name] = group
    _changes += 1


def drop_group(name: str) -> None:
    """Forget a group; operators that name it raise from now on."""
    global _changes
    _groups.pop(name, None)
    _changes += 1


def group_changes() -> int:
    """How often groups of this process were set or dropped. Calls that were noted before hold the former ones."""
    return _changes


def _group(name: str) -> ParallelGroup:
    if name not in _groups:
        raise RuntimeError(
            f"this process belongs to no group {name!r}; a graph for several ranks runs in processes of its own, "
            "which tensor_parallel_size= starts"
        )
    return _groups[name]


def all_reduce_reference(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of every rank's ``x``.

    Args:
        x: any shape, fp32, bf16 or fp16; the same shape on all ranks.
        group: name of the ranks.

    Returns:
        the shape and dtype of ``x``, contiguous; the same bits on all ranks.

    Raises:
        RuntimeError: this process is in no such group.
    """
    return _group(group).all_reduce(x)


def all_gather_reference(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Every rank's ``x`` beside each other.

    Args:
        x: ``[..., n]``, the same shape on all ranks.
        size: number of ranks.
        group: their name.

    Returns:
        ``[..., size * n]`` in the dtype of ``x``, contiguous; rank 0's part comes first.

    Raises:
        RuntimeError: this process is in no such group, or the group has another size.
    """
    found = _group(group)
    if found.size != size:
        raise RuntimeError(f"the graph gathers from {size} ranks, but group {group!r} has {found.size}")
    return found.all_gather(x)


def beside_each_other(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """What ``all_gather`` yields of the ranks' tensors one behind the other along the first dim."""
    return torch.cat(blocks.chunk(size), -1)


def _gathered(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] * size))


all_reduce = register_operator(
    "all_reduce(Tensor x, str group) -> Tensor",
    Facts(over="elements", invariant=True, kind="", spelled_out=False),
    fake=like_input,
    reference=all_reduce_reference,
    cpu=all_reduce_reference,
)
all_gather = register_operator(
    "all_gather(Tensor x, int size, str group) -> Tensor",
    Facts(over="rows", invariant=True, kind="", spelled_out=False),
    fake=_gathered,
    reference=all_gather_reference,
    cpu=all_gather_reference,
)
