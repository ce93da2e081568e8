"""Records of the block manager: groups of layers, sequences, counts."""

from __future__ import annotations

from dataclasses import dataclass

from .pool import NULL_BLOCK

UNKNOWN = -1
"""Tokens of a state that is being written: an interrupted step may have left a part of it old and a part new."""


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share one block table per sequence; their blocks are one pool.

    Attributes:
        num_blocks: in each of its layers' caches, at most.
        min_blocks: that are there without load, where the pool is to grow and shrink; 0: always all.
        window: tokens that the layers look back over, the token itself included; 0 when unlimited.
        is_state: its blocks are slots of states of recurrent and convolution layers, of which a sequence has one
            whatever its length.
        num_host_blocks: in the host memory that sequences are swapped out to.
    """

    num_blocks: int
    window: int = 0
    is_state: bool = False
    num_host_blocks: int = 0
    min_blocks: int = 0

    def length(self, num_tokens: int, block_size: int) -> int:
        """Entries of a table that holds so many tokens."""
        return 1 if self.is_state else -(-num_tokens // block_size)

    def first_seen(self, num_blocks: int, block_size: int) -> int:
        """The first block that the token after so many full blocks sees; that whose end a state is the one after."""
        if self.is_state:
            return max(0, num_blocks - 1)
        return max(0, num_blocks * block_size - self.window + 1) // block_size if self.window else 0


@dataclass(slots=True)
class SequenceBlocks:
    """A sequence with blocks on the device."""

    num_tokens: int  # that the tables were asked to hold
    tables: list[list[int]]  # for each group; leading entries may be NULL_BLOCK
    num_null: list[int]
    num_committed: int = 0  # leading blocks whose content was given a hash
    is_stale: bool = False  # its content does not follow from its tokens any more
    state_tokens: int = 0  # that its state covers; UNKNOWN while a step writes over it
    state_target: int = NULL_BLOCK  # slot that the step under way writes, where it is not the one it goes on from


@dataclass(slots=True)
class Counts:
    """Counts of what happened since the manager was made."""

    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    copies_on_write: int = 0
    moved: int = 0
