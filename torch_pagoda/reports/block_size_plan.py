"""Chooses a KV-cache block size for expected sequence lengths.

A sequence of ``L`` tokens takes ``ceil(L / B)`` blocks of ``B`` tokens. Two costs pull in opposite directions, both
counted in tokens of KV cache:

- **internal fragmentation**: ``B * ceil(L / B) - L`` slots of the last block are empty, about ``B / 2`` of them;
- **overhead**: each block costs an entry of the block table, its bookkeeping, and a break in the stream of keys and
  values that the attention kernel reads. It is counted as reading ``block_overhead`` more tokens.

The cost of ``B`` is their expected sum, ``E[B * ceil(L / B) - L] + block_overhead * E[ceil(L / B)]``. For lengths far
above ``B`` that is about ``B / 2 + block_overhead * E[L] / B``, least at ``B = sqrt(2 * block_overhead * E[L])``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.requests.checks import whole_number

CANDIDATES = (8, 16, 32, 64, 128, 256)
"""Block sizes compared by default."""

BLOCK_OVERHEAD = 0.5
"""Tokens of KV whose reading takes as long as one more block. Decode steps of the CPU kernel, timed at block sizes
from 8 to 256 for 4 and 8 KV heads of 64 and 128 in float32 and bfloat16, give between 0 and 0.8."""

LONGEST = 1 << 17
"""Default maximum tokens of a log-normal length."""


@dataclass(frozen=True)
class LogNormalLengths:
    """A log-normal distribution of lengths.

    Attributes:
        mean: expected tokens of a sequence, prompt and output together, before truncation.
        sigma: standard deviation of the logarithm; 0 when all are equal.
        longest: maximum tokens; longer lengths are truncated.
    """

    mean: float
    sigma: float
    longest: int = LONGEST

    def __post_init__(self) -> None:
        if not (self.mean > 0 and math.isfinite(self.mean)):
            raise ValueError(f"mean={self.mean} is not positive; use a positive number of tokens")
        if not (self.sigma >= 0 and math.isfinite(self.sigma)):
            raise ValueError(f"sigma={self.sigma} is not a standard deviation; use at least 0")
        whole_number("longest", self.longest, 1, "use the model's longest sequence")

    def exceeds(self, tokens: float) -> float:
        """Probability that a sequence is longer than ``tokens``."""
        if tokens <= 0:
            return 1.0
        if tokens >= self.longest:
            return 0.0
        if self.sigma == 0:
            return 1.0 if self.mean > tokens else 0.0
        # E[exp(N(mu, sigma^2))] is exp(mu + sigma^2 / 2).
        mu = math.log(self.mean) - self.sigma**2 / 2
        return 0.5 * math.erfc((math.log(tokens) - mu) / (self.sigma * math.sqrt(2)))


@dataclass(frozen=True)
class BlockSizeCost:
    """Expected cost of a block size, per sequence.

    Attributes:
        block_size: tokens per block.
        blocks: expected blocks of a sequence.
        wasted_tokens: expected empty slots.
        fragmentation: these as a share of all allocated slots.
        overhead_tokens: cost of the blocks themselves, in tokens.
    """

    block_size: int
    blocks: float
    wasted_tokens: float
    fragmentation: float
    overhead_tokens: float

    @property
    def cost(self) -> float:
        """Wasted and overhead tokens together."""
        return self.wasted_tokens + self.overhead_tokens


@dataclass(frozen=True)
class BlockSizePlan:
    """The chosen block size, and the costs behind it.

    Attributes:
        block_size: the cheapest candidate; on a tie, the larger one.
        mean_tokens: expected tokens of a sequence.
        costs: of all candidates, in ascending order of size.
    """

    block_size: int
    mean_tokens: float
    costs: tuple[BlockSizeCost, ...]


def plan_block_size(
    lengths: Sequence[int] | LogNormalLengths,
    candidates: Sequence[int] = CANDIDATES,
    *,
    block_overhead: float = BLOCK_OVERHEAD,
) -> BlockSizePlan:
    """Choose a block size for sequences of expected lengths, by the cost model of this module.

    Args:
        lengths: samples, tokens of prompt and output together, or a distribution.
        candidates: block sizes to choose from; for an NPU multiples of 16.
        block_overhead: cost of one block in addition to its tokens, in tokens of KV read.

    Raises:
        ValueError: no lengths, no candidates, one below 1, or a negative overhead.
    """
    if not isinstance(lengths, LogNormalLengths):
        if not lengths:
            raise ValueError("lengths is empty; give the tokens of at least one sequence")
        if min(lengths) < 1:
            raise ValueError(f"lengths has {min(lengths)}; use at least 1 token per sequence")
    if not candidates or min(candidates) < 1:
        raise ValueError(f"candidates={list(candidates)} is invalid; give block sizes of at least 1 token")
    if not block_overhead >= 0:
        raise ValueError(f"block_overhead={block_overhead} is negative; use at least 0")
    tokens = expected_blocks(lengths, 1)
    costs = []
    for size in sorted(set(candidates)):
        blocks = expected_blocks(lengths, size)
        wasted = size * blocks - tokens
        costs.append(BlockSizeCost(size, blocks, wasted, wasted / (size * blocks), block_overhead * blocks))
    best = min(costs, key=lambda entry: (entry.cost, -entry.block_size))
    return BlockSizePlan(best.block_size, tokens, tuple(costs))


def expected_blocks(lengths: Sequence[int] | LogNormalLengths, block_size: int) -> float:
    """``E[ceil(L / block_size)]``: mean blocks per sequence."""
    if not isinstance(lengths, LogNormalLengths):
        return sum(-(-length // block_size) for length in lengths) / len(lengths)
    # A block more is taken for each multiple of the block size that the length exceeds.
    return math.fsum(lengths.exceeds(start) for start in range(0, lengths.longest, block_size))
