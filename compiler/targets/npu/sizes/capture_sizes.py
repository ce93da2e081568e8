"""Sizes of steps that are captured as static graphs, and the one that a step is padded to.

Pure functions: nothing here knows a device.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from .graph_resources import CAPTURES_PER_GRAPH

_DECODE_SHARE = 0.9
_CHUNK_STEP = 16


def padded_size(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ``sizes``, which ascend, that is not below ``size``; None above the last."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None


def most_padding(sizes: Sequence[int]) -> int:
    """The most that a step of 1 to the last of ``sizes``, which ascend, is padded by."""
    return max((upper - lower - 1 for lower, upper in itertools.pairwise((0, *sizes))), default=0)


def wasted(mix: Mapping[int, float], sizes: Sequence[int]) -> float:
    """Padding of all steps of ``mix`` together: sum of weight times (padded size - size).

    Raises:
        ValueError: a step is larger than every one of ``sizes``.
    """
    total = 0.0
    for size, weight in mix.items():
        padded = padded_size(size, sizes)
        if padded is None:
            raise ValueError(f"sizes={tuple(sizes)} ends below the step of {size} in mix; add a larger size")
        total += weight * (padded - size)
    return total


def plan_capture_sizes(mix: Mapping[int, float], max_size: int, limit: int = CAPTURES_PER_GRAPH) -> tuple[int, ...]:
    """At most ``limit`` sizes, ``max_size`` among them, that pad the steps of ``mix`` the least.

    Exact. An optimal choice takes its sizes from ``mix`` and ``max_size``: any other size can shrink to the largest
    step that is padded to it. With the steps s_1 < ... < s_n, prefix sums W of their weights and X of weight times
    size, the least padding of the first j steps by k sizes, the last of them s_j, is

        D_k(j) = min over i < j of D_{k-1}(i) + s_j (W_j - W_i) - (X_j - X_i)

    The best i grows with j (the padding of a range of steps is a Monge array), so that each D_k is computed by
    halving, in O(n log n).

    Args:
        mix: size of a step → how often it comes, in any unit; sizes from 1 to ``max_size``, weights not negative.
        max_size: the largest step.
        limit: how many sizes there may be.

    Returns:
        Ascending sizes; no more of them than there are different steps.

    Raises:
        ValueError: an argument is out of range.
    """
    if max_size < 1 or limit < 1:
        raise ValueError(f"max_size={max_size} and limit={limit} must be at least 1")
    for size, weight in mix.items():
        if not 1 <= size <= max_size or not weight >= 0:
            raise ValueError(
                f"mix[{size}]={weight} is not a step of 1 to {max_size} tokens with a weight of at least 0"
            )
    steps = sorted({size for size, weight in mix.items() if weight > 0} | {max_size})
    if len(steps) <= limit:
        return tuple(steps)
    weights: list[float] = [0]
    moments: list[float] = [0]
    for size in steps:
        weights.append(weights[-1] + mix.get(size, 0))
        moments.append(moments[-1] + mix.get(size, 0) * size)

    def padding(i: int, j: int) -> float:
        """Of the steps i + 1 to j, counted from 1, when all are padded to the last of them."""
        return steps[j - 1] * (weights[j] - weights[i]) - (moments[j] - moments[i])

    n = len(steps)
    least = [padding(0, j) if j else 0 for j in range(n + 1)]
    chosen: list[list[int]] = []
    for _ in range(1, limit):
        least, best = _one_size_more(least, padding)
        chosen.append(best)
    sizes, j = [steps[n - 1]], n
    while chosen and (j := chosen.pop()[j]):
        sizes.append(steps[j - 1])
    return tuple(reversed(sizes))


def _one_size_more(before: Sequence[float], padding: Callable[[int, int], float]) -> tuple[list[float], list[int]]:
    """D_k and for each j the i that it takes, from D_{k-1}."""
    least, best = [0.0] * len(before), [0] * len(before)
    # Parts of j whose best i lies in a known range; the middle one halves both.
    parts = [(1, len(before) - 1, 0, len(before) - 2)]
    while parts:
        first, last, low, high = parts.pop()
        if first > last:
            continue
        j = (first + last) // 2
        least[j], best[j] = min((before[i] + padding(i, j), i) for i in range(low, min(high, j - 1) + 1))
        parts += [(first, j - 1, low, best[j]), (j + 1, last, best[j], high)]
    return least, best


def request_mix(
    max_num_seqs: int, max_num_batched_tokens: int, *, decode_share: float = _DECODE_SHARE
) -> dict[int, float]:
    """Shares of the steps of each size that a batcher makes, when nobody has counted.

    Decode steps, one token for each of 1 to ``max_num_seqs`` sequences, are equally likely and together
    ``decode_share`` of all. Of the others, which hold chunks of prompts, half fill the budget, since long prompts are
    cut to do so, and half lie anywhere above the largest decode step, in steps of 16.

    Args:
        max_num_seqs: most sequences at once.
        max_num_batched_tokens: most tokens per step.
        decode_share: between 0 and 1.

    Returns:
        step size → share of the steps; the shares add up to 1.

    Raises:
        ValueError: an argument is out of range.
    """
    if max_num_seqs < 1 or max_num_batched_tokens < 1 or not 0 <= decode_share <= 1:
        raise ValueError(
            f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens} must be at least 1, "
            f"decode_share={decode_share} between 0 and 1"
        )
    most = min(max_num_seqs, max_num_batched_tokens)
    if most == max_num_batched_tokens:
        decode_share = 1.0
    mix = {size: decode_share / most for size in range(1, most + 1)}
    chunks = range(max_num_batched_tokens, most, -_CHUNK_STEP)
    for size in chunks:
        mix[size] = (1 - decode_share) / 2 / len(chunks)
    if chunks:
        mix[max_num_batched_tokens] += (1 - decode_share) / 2
    return mix
