"""Prompts and lengths of benchmark requests, the same for the same seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from random_llama import VOCAB_SIZE


@dataclass(frozen=True)
class Workload:
    """Requests that are there from the beginning.

    Attributes:
        prompts: token ids of each.
        outputs: how many tokens each generates.
    """

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def num_tokens(self) -> int:
        """Of all prompts and outputs."""
        return sum(map(len, self.prompts)) + sum(self.outputs)


def log_normal_lengths(count: int, mean: float, sigma: float, most: int, generator: torch.Generator) -> list[int]:
    """``count`` lengths between 2 and ``most`` whose logarithm is normally distributed.

    Args:
        count: how many.
        mean: of the lengths, before those above ``most`` are cut.
        sigma: standard deviation of their logarithm.
        most: longer ones become so long.
        generator: draws.
    """
    # The mean of exp(N(mu, sigma)) is exp(mu + sigma² / 2).
    logs = torch.randn(count, generator=generator, dtype=torch.float64) * sigma + math.log(mean) - sigma**2 / 2
    return logs.exp().round().clamp(2, most).long().tolist()


def random_prompt(length: int, generator: torch.Generator) -> list[int]:
    """Token ids that have nothing in common with another prompt's."""
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def log_normal_workload(count: int, mean: int, most: int, *, sigma: float = 0.5, seed: int = 0) -> Workload:
    """Requests whose length, prompt and output together, is log-normal; prompt and output are half of it each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = log_normal_lengths(count, mean, sigma, most, generator)
    prompts = [random_prompt((length + 1) // 2, generator) for length in lengths]
    return Workload(prompts, [length // 2 for length in lengths])
