"""A program's caches by kind, those that grow with tokens and states of sequences, and their sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..program import CacheSpec, Program, StateSpec

AnySpec = CacheSpec | StateSpec


def whole_caches(program: Program) -> Sequence[AnySpec]:
    """Return the caches of a model of which ``program`` may be a stage."""
    return getattr(program, "whole_caches", program.caches)


def of_all_ranks(specs: Sequence[AnySpec]) -> list[AnySpec]:
    """Return the caches of one process, of which these are what one of several ranks holds."""
    return [
        replace(spec, num_kv_heads=spec.num_kv_heads * spec.head_ranks, head_ranks=1)
        if isinstance(spec, CacheSpec)
        else spec
        for spec in specs
    ]


def token_specs(specs: Sequence[AnySpec]) -> list[CacheSpec]:
    """Return the specs of caches that grow with the tokens of a sequence."""
    return [spec for spec in specs if isinstance(spec, CacheSpec)]


def has_state(specs: Sequence[AnySpec]) -> bool:
    """Return True if the model keeps state."""
    return any(isinstance(spec, StateSpec) for spec in specs)


def num_token_groups(specs: Sequence[AnySpec]) -> int:
    """Return the number of groups of layers with block tables; 1 if nothing is stored at all."""
    if not specs:
        return 1
    return max((spec.group for spec in token_specs(specs)), default=-1) + 1


def bytes_per_block(specs: Sequence[AnySpec], block_size: int) -> int:
    """Return the bytes of one block in all layers' caches, including int8 scales; states take none."""
    return block_size * sum(part.unit_bytes for spec in token_specs(specs) for part in spec.parts())


def bytes_per_slot(specs: Sequence[AnySpec]) -> int:
    """Return the bytes of one sequence's state in all layers."""
    return sum(part.unit_bytes for spec in specs if isinstance(spec, StateSpec) for part in spec.parts())
