"""The block manager: pools of blocks, block tables, prefix caching, swapping and defragmentation."""

from .groups import BlockGroup
from .hashing import chain_start, extend_chain
from .manager import BlockManager
from .moves import CacheCopy
from .pool import NULL_BLOCK, BlockPool, OutOfBlocks
from .prefix import Prefix
from .swap_space import SwapSpace

__all__ = [
    "NULL_BLOCK",
    "BlockGroup",
    "BlockManager",
    "BlockPool",
    "CacheCopy",
    "OutOfBlocks",
    "Prefix",
    "SwapSpace",
    "chain_start",
    "extend_chain",
]
