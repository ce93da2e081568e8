"""Sizes and allocates the paged KV cache."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..memory import advise_huge_pages
from ..program import CachePart, CacheSpec, KVCache, StateSpec
from ..requests.checks import check_at_least
from .cache_specs import AnySpec, bytes_per_block, bytes_per_slot

logger = logging.getLogger(__name__)

DEFAULT_CPU_CACHE_BYTES = 4 << 30
"""Largest default cache on a plain CPU."""

UNSTATED_MODEL_LEN = 1 << 17
"""Tokens per sequence that the default cache provides for if the model does not specify a maximum."""


def available_memory() -> int:
    """Return the host memory in bytes that this process can still use, within the limit of its control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        free = int(found[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            # The page cache counts as used but is released under pressure.
            cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, int(limit) - used + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):
        pass
    return max(free, 0)


def num_blocks_in(memory: int, specs: Sequence[CacheSpec], block_size: int) -> int:
    """Return the number of blocks that fit into ``memory`` bytes.

    Raises:
        ValueError: not even one block fits.
    """
    size = bytes_per_block(specs, block_size)
    if size > memory:
        raise ValueError(
            f"kv_cache_memory={memory} bytes is too small for a block of {block_size} tokens ({size} bytes); "
            "increase kv_cache_memory or lower block_size"
        )
    return memory // size if size else memory


def default_num_blocks(
    specs: Sequence[CacheSpec],
    block_size: int,
    max_num_seqs: int,
    max_model_len: int | None,
    *,
    memory: int | None = None,
) -> int:
    """Return the default number of blocks: enough for ``max_num_seqs`` sequences of ``max_model_len`` tokens.

    Args:
        specs: cache specification of each layer.
        block_size: tokens per block.
        max_num_seqs: most sequences at once.
        max_model_len: most tokens per sequence; None if the model does not specify it.
        memory: most bytes to take. None: 4 GiB or half of the host's free memory, whichever is less.

    Raises:
        ValueError: not even one block fits.
    """
    if memory is None:
        memory = min(DEFAULT_CPU_CACHE_BYTES, available_memory() // 2)
    fitting = num_blocks_in(memory, specs, block_size)
    longest = UNSTATED_MODEL_LEN if max_model_len is None else max_model_len
    return max(1, min(fitting, max_num_seqs * -(-longest // block_size)))


def allocate_kv_cache(
    specs: Sequence[AnySpec], num_blocks: int | Sequence[int], block_size: int, device: torch.device | str = "cpu"
) -> KVCache:
    """Allocate the cache tensors of every entry of ``specs``: (key, value), for int8 (key, value, key scale, value
    scale), and for a state its one tensor.

    Args:
        specs: cache specification of each layer.
        num_blocks: blocks of each layer, or of each group of layers; for states the number of slots.
        block_size: tokens per block.
        device: device of the tensors.

    Returns:
        Keys and values ``[num_blocks, block_size, num_kv_heads, dim]``, scales without the last dim, or
        ``[num_blocks, num_kv_heads, block_size]`` if the entry has ``scales_by_head``. Unless it has ``by_token``,
        they are views of ``[num_blocks, num_kv_heads, block_size, ...]``: one head's tokens of a block are
        contiguous, which suits a CPU. States are ``[num_slots, *shape]``.
        The tensors are uninitialized, so on a CPU a page takes memory only once a token is stored in it.

    Raises:
        ValueError: ``num_blocks`` or ``block_size`` is below 1.
        RuntimeError: the device has too little memory.
    """
    fewest = num_blocks if isinstance(num_blocks, int) else min(num_blocks)
    check_at_least(1, "use a positive value", num_blocks=fewest, block_size=block_size)
    counts = [num_blocks if isinstance(num_blocks, int) else num_blocks[spec.group] for spec in specs]

    def pages(spec: CacheSpec, part: CachePart, count: int) -> torch.Tensor:
        heads, *dims = part.unit_shape
        inner = part.block_shape(block_size) if spec.by_token else (heads, block_size, *dims)
        storage = torch.empty(count, *inner, dtype=part.dtype, device=torch.device(device))
        advise_huge_pages(storage)
        return storage if spec.by_token else storage.transpose(1, 2)

    def slots(spec: StateSpec, count: int) -> tuple[torch.Tensor, ...]:
        (part,) = spec.parts()
        storage = torch.empty(count, *part.unit_shape, dtype=part.dtype, device=torch.device(device))
        advise_huge_pages(storage)
        return (storage,)

    size = sum(
        count * (bytes_per_block([spec], block_size) + bytes_per_slot([spec]))
        for spec, count in zip(specs, counts, strict=True)
    )
    try:
        cache = [
            slots(spec, count)
            if isinstance(spec, StateSpec)
            else tuple(pages(spec, part, count) for part in spec.parts())
            for spec, count in zip(specs, counts, strict=True)
        ]
    except RuntimeError as error:
        raise RuntimeError(
            f"num_blocks={num_blocks} takes {size / 2**30:.2f} GiB on {device}, which is not available; "
            f"lower num_blocks or kv_cache_memory{', or max_num_seqs' if bytes_per_slot(specs) else ''}"
        ) from error
    logger.info("KV cache: %s blocks of %d tokens, %.2f GiB on %s", num_blocks, block_size, size / 2**30, device)
    return cache
