"""Records of the block manager: groups of layers and sequences."""

from __future__ import annotations

from dataclasses import dataclass

from .pool import NULL_BLOCK

UNKNOWN = -1
"""Token count of a state that is being written: an interrupted step may have left it partly old and partly new."""


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share one block table per sequence; one pool holds their blocks.

    Attributes:
        num_blocks: most blocks in each of its layers' caches.
        min_blocks: blocks kept when idle, if the pool is to grow and shrink; 0: always all.
        window: tokens that the layers look back over, the token itself included; 0 when unlimited.
        is_state: its blocks are slots for states of recurrent and convolution layers; a sequence has one, whatever
            its length.
        num_host_blocks: blocks of host memory for swapped-out sequences.
    """

    num_blocks: int
    window: int = 0
    is_state: bool = False
    num_host_blocks: int = 0
    min_blocks: int = 0

    def length(self, num_tokens: int, block_size: int) -> int:
        """Return the number of entries of a table for ``num_tokens`` tokens."""
        return 1 if self.is_state else -(-num_tokens // block_size)

    def first_seen(self, num_blocks: int, block_size: int) -> int:
        """Return the first block that the token after ``num_blocks`` full blocks sees; for a state, the last one."""
        if self.is_state:
            return max(0, num_blocks - 1)
        return max(0, num_blocks * block_size - self.window + 1) // block_size if self.window else 0


@dataclass(slots=True)
class SequenceBlocks:
    """A sequence with blocks on the device."""

    num_tokens: int  # requested capacity of the tables
    tables: list[list[int]]  # per group; leading entries may be NULL_BLOCK
    num_null: list[int]
    num_committed: int = 0  # leading blocks whose content has a hash
    is_stale: bool = False  # its content no longer follows from its tokens
    state_tokens: int = 0  # tokens covered by its state; UNKNOWN while a step overwrites it
    state_target: int = NULL_BLOCK  # slot that the launched step writes, if not the one it reads
