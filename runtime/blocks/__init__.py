"""The block manager: pools of blocks, block tables, prefix caching, swapping and defragmentation."""

from .copies import CacheCopy
from .groups import BlockGroup
from .hashing import chain_start, extend_chain
from .manager import BlockManager
from .pool import NULL_BLOCK, BlockPool, OutOfBlocks
from .prefix import Prefix
from .swap_space import SwapSpace
from .tables import BlockTables

__all__ = [
    "NULL_BLOCK",
    "BlockGroup",
    "BlockManager",
    "BlockPool",
    "BlockTables",
    "CacheCopy",
    "OutOfBlocks",
    "Prefix",
    "SwapSpace",
    "chain_start",
    "extend_chain",
]
