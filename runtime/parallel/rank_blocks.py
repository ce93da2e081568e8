"""Blocks in the host memory of all ranks, each of which holds its own KV heads."""

from __future__ import annotations

from collections.abc import Sequence

from ..cache.cache_specs import AnySpec
from ..cache.host_blocks import HostBlocks
from ..program import CacheSpec
from .shared_bytes import SharedBytes


class RankBlocks:
    """``HostBlocks`` of a model whose heads are divided among the ranks of one host.

    A block's parts are those of all heads, in the order that they have in one process.

    Args:
        specs: of rank 0; the others' are the same.
        num_blocks, block_size: as for ``HostBlocks``.
        size: number of ranks.

    Attributes:
        cache: rank 0's.
        num_heads: of all ranks together.
        shared: the memory of each other rank.

    Raises:
        ValueError: not every layer's heads are divided in that order.
    """

    def __init__(self, specs: Sequence[AnySpec], num_blocks: Sequence[int], block_size: int, size: int) -> None:
        for spec in specs:
            if not isinstance(spec, CacheSpec):
                raise ValueError("kv_store does not support tensor_parallel_size above 1 for models with states")
            if spec.head_ranks != size:
                raise ValueError(
                    f"kv_store does not support tensor_parallel_size={size} for this model: a layer's KV heads "
                    "are not divided among the ranks; lower it, or omit kv_store"
                )
        heads = {(spec.group, spec.num_kv_heads) for spec in specs if isinstance(spec, CacheSpec)}
        if len(heads) > len({spec.group for spec in specs}):
            raise ValueError(
                f"kv_store does not support tensor_parallel_size={size} for this model: its layers have different "
                "numbers of KV heads; omit one of them"
            )
        self.shared = [SharedBytes.create() for _ in range(1, size)]
        own = HostBlocks(specs, num_blocks, block_size)
        others = [HostBlocks(specs, num_blocks, block_size, memory.allocate) for memory in self.shared]
        self._each = [own, *others]
        self.cache = own.cache
        self.num_heads = [count * size for count in own.num_heads]

    def parts(self, group: int, block: int) -> list[memoryview]:
        """See ``HostBlocks``."""
        return [part for blocks in self._each for part in blocks.parts(group, block)]
