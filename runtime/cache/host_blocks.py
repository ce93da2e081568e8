"""Host memory for blocks, in which what one KV head has of a block, in all layers of a group, lies together.

So it can be written to a store, and read back, in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..program import CachePart, KVCache, StateSpec
from ..requests.checks import check_at_least
from .cache_specs import AnySpec

_ALIGNMENT = 64
"""Bytes: a part begins at a multiple of it."""


class HostBlocks:
    """Blocks of all groups, each ``[head][layer, part][token, dim]``; a state is one head.

    Layers with more heads come first, so that the parts of a head lie together although others lack it.

    Args:
        specs: cache specification of each layer.
        num_blocks: blocks of each group, slots of that of states.
        block_size: tokens per block.
        allocate: makes the bytes of a group, flat; None: torch does.

    Attributes:
        cache: tensors of every entry of ``specs``, as ``allocate_kv_cache`` makes them.
        num_heads: KV heads of each group.

    Raises:
        ValueError: ``num_blocks`` or ``block_size`` is below 1.
        RuntimeError: the host has too little memory.
    """

    def __init__(
        self,
        specs: Sequence[AnySpec],
        num_blocks: Sequence[int],
        block_size: int,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        check_at_least(1, "use a positive value", num_blocks=min(num_blocks), block_size=block_size)
        self.num_heads: list[int] = []
        self._sizes: list[list[int]] = []
        self._bytes: list[torch.Tensor] = []
        entries: dict[int, list[torch.Tensor]] = {}
        for group, count in enumerate(num_blocks):
            layers = [i for i, spec in enumerate(specs) if spec.group == group]
            layers.sort(key=lambda i: -_num_heads(specs[i]))
            heads = _num_heads(specs[layers[0]])
            row, places = 0, list[tuple[int, CachePart, int]]()
            sizes = [0] * heads
            for i in layers:
                for part in specs[i].parts():
                    places.append((i, part, row))
                    end = row + _bytes_of_head(specs[i], part, block_size)
                    row = -(-end // _ALIGNMENT) * _ALIGNMENT
                    sizes[: _num_heads(specs[i])] = [end] * _num_heads(specs[i])
            size = count * heads * row
            flat = torch.empty(size, dtype=torch.uint8) if allocate is None else allocate(size)
            memory = flat.view(count, heads, row)
            for i, part, at in places:
                entries.setdefault(i, []).append(_view(specs[i], part, memory, at, block_size))
            self.num_heads.append(heads)
            self._sizes.append(sizes)
            self._bytes.append(memory)
        self.cache: KVCache = [tuple(entries[i]) for i in range(len(specs))]

    def parts(self, group: int, block: int) -> list[memoryview]:
        """Return the bytes of a block, a piece for each head."""
        rows = self._bytes[group][block]
        return [rows[head, :size].numpy().data for head, size in enumerate(self._sizes[group])]


def _num_heads(spec: AnySpec) -> int:
    return 1 if isinstance(spec, StateSpec) else spec.num_kv_heads


def _bytes_of_head(spec: AnySpec, part: CachePart, block_size: int) -> int:
    return part.unit_bytes if isinstance(spec, StateSpec) else part.unit_bytes // spec.num_kv_heads * block_size


def _view(spec: AnySpec, part: CachePart, memory: torch.Tensor, at: int, block_size: int) -> torch.Tensor:
    """One part of one layer, in the shape that the copies of blocks expect."""
    size = part.dtype.itemsize
    count, _, row = memory.shape
    flat = memory.view(-1).view(part.dtype)
    if isinstance(spec, StateSpec):
        strides = torch.empty(part.unit_shape, device="meta").stride()
        whole = memory.shape[1] * row // size
        return flat.as_strided((count, *part.unit_shape), (whole, *strides), at // size)
    heads, *dims = part.unit_shape
    inner = (dims[0], 1) if dims else (1,)
    by_head = flat.as_strided(
        (count, heads, block_size, *dims), (memory.shape[1] * row // size, row // size, *inner), at // size
    )
    return by_head if part.by_head else by_head.transpose(1, 2)
