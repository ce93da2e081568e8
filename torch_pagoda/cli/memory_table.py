"""The memory table of ``pagoda plan``; its printed numbers add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from rich.table import Table

from .number_table import number_table

if TYPE_CHECKING:
    from ..reports.memory_plan import MemoryPlan

GIB, GB = 2**30, 10**9

_FEWEST_DECIMALS, _MOST_DECIMALS = 2, 6


def memory_table(found: MemoryPlan) -> Table:
    """The parts of the memory, in binary and in decimal units.

    In each column, unindented rows add up to the last one, and indented rows to the KV cache.

    Args:
        found: the plan.
    """
    name = cache_name(found)
    outer = {
        "weights": found.weight_bytes,
        f"activations, {found.max_num_batched_tokens} tokens, estimated": found.activation_bytes,
        name: found.cache_bytes,
    }
    lacking = sum(outer.values()) - found.memory
    if lacking:
        outer["not there"] = -lacking
    inner = {}
    if found.cache_bytes:
        left = left_over(found)
        states = found.state_slots * found.state_bytes
        inner = {"  blocks": found.cache_bytes - left - states, "  states": states, "  left over": left}
        if not found.state_bytes:
            del inner["  states"]
        if not found.pools:
            del inner["  blocks"]
    columns = [_column(outer, inner, found.memory, unit, name) for unit in (GIB, GB)]
    table = number_table("memory", "GiB", "GB")
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    return table


def cache_name(found: MemoryPlan) -> str:
    """The share of memory left after weights and activations."""
    if not found.state_bytes:
        return "KV cache"
    return "KV cache and states" if found.pools else "states"


def block_line(found: MemoryPlan) -> str:
    """Describe each pool's blocks and tokens, the number of states, and the unused rest of the cache."""
    parts = []
    for pool in found.pools:
        layers = f" of {len(pool.layers)} layers" if len(found.pools) > 1 else ""
        window = f" with a window of {pool.window} tokens" if pool.window else ""
        parts.append(f"{pool.num_blocks:,} blocks{layers}{window}, for {pool.num_blocks * found.block_size:,} tokens")
    if found.state_bytes:
        parts.append(f"{found.state_slots:,} slots of states")
    return f"{'; '.join(parts)}; {left_over(found):,} bytes are left over."


def left_over(found: MemoryPlan) -> int:
    """Bytes of the cache in no block and no state."""
    taken = sum(pool.num_blocks * pool.block_bytes for pool in found.pools) + found.state_slots * found.state_bytes
    return found.cache_bytes - taken


def apportioned(parts: Sequence[int], unit: Fraction | int, whole: int) -> list[int]:
    """Round sizes to multiples of a unit that add up, with the largest-remainder method.

    Args:
        parts: sizes.
        unit: size of one unit.
        whole: total units: the sum of the sizes, rounded up or down.

    Returns:
        The multiples: each the size divided by the unit, rounded up or down.
    """
    shares = [math.floor(Fraction(part) / unit) for part in parts]
    remainders = [Fraction(part) / unit - share for part, share in zip(parts, shares, strict=True)]
    missing = whole - sum(shares)
    for i in sorted(range(len(parts)), key=lambda i: -remainders[i])[:missing]:
        shares[i] += 1
    return shares


def _column(outer: dict[str, int], inner: dict[str, int], memory: int, unit: int, divided: str) -> dict[str, str]:
    """The numbers of a column by row, with enough decimals for three digits of the smallest part."""
    smallest = min(size for size in (memory, *outer.values()) if size > 0)
    decimals = min(max(2 - math.floor(math.log10(smallest / unit)), _FEWEST_DECIMALS), _MOST_DECIMALS)
    last = Fraction(unit, 10**decimals)
    whole = round(memory / last)
    shares = dict(zip(outer, apportioned(list(outer.values()), last, whole), strict=True))
    within = dict(zip(inner, apportioned(list(inner.values()), last, shares[divided]), strict=True))
    rows = {}
    for name, share in {**shares, "all": whole}.items():
        rows[name] = share
        if name == divided:
            rows.update(within)
    return {name: f"{share / 10**decimals:.{decimals}f}" for name, share in rows.items()}
