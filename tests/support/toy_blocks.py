"""A block manager of one group, and sequences of known content in it, for tests."""

from __future__ import annotations

from torch_pagoda.runtime.blocks import BlockGroup, BlockManager, chain_start, extend_chain


def make(
    num_blocks: int = 8, block_size: int = 4, *, window: int = 0, host: int = 0, caching: bool = False
) -> BlockManager:
    group = BlockGroup(num_blocks, window=window, num_host_blocks=host)
    return BlockManager([group], block_size, enable_prefix_caching=caching)


def hashes_of(tokens: range | list[int], block_size: int = 4, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, list(tokens), 0, block_size, chain_start(salt))
    return hashes


def compute(blocks: BlockManager, name: str, tokens: range | list[int], *, salt: str = "") -> list[bytes]:
    """Let a new sequence hold and have computed all of these tokens."""
    hashes = hashes_of(tokens, blocks.block_size, salt)
    blocks.allocate(name, len(tokens), 0)
    blocks.commit(name, hashes, len(tokens))
    return hashes
