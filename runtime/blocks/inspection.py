"""Statistics of a block manager and the check of its invariants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .pool import NULL_BLOCK, BlockPool

if TYPE_CHECKING:
    from .manager import BlockManager


def stats(manager: BlockManager) -> dict[str, int | float]:
    """Return statistics of all groups together.

    Returns:
        ``utilization``: used blocks divided by all blocks; ``internal_fragmentation``: empty token slots divided by
        all token slots of used blocks; ``prefix_hit_rate``: tokens found cached divided by tokens looked up. The
        others are counts of blocks, or of tokens if the name says so. State slots are not counted as blocks; if the
        model has any, they are ``state_slots_total``, ``_used``, ``_cached`` (snapshots) and ``_free``,
        ``_used_peak`` and ``_evicted``.
    """
    tokens, slots = _filled(manager)
    hits, queries = manager.num_prefix_hits, manager.num_prefix_queries
    states = _state_figures(manager.pools[-1]) if manager.has_state else {}
    return {
        "blocks_total": manager.num_blocks,
        "blocks_used": manager.num_used_blocks,
        "blocks_cached": manager.num_cached_blocks,
        "blocks_free": sum(pool.num_free for pool in manager.token_pools),
        "blocks_used_peak": sum(pool.peak_used for pool in manager.token_pools),
        "utilization": manager.num_used_blocks / manager.num_blocks if manager.num_blocks else 0.0,
        "internal_fragmentation": 1 - tokens / slots if slots else 0.0,
        "prefix_query_tokens": queries,
        "prefix_hit_tokens": hits,
        "prefix_hit_rate": hits / queries if queries else 0.0,
        "evictions": sum(pool.evictions for pool in manager.token_pools),
        "copies_on_write": manager.num_copies_on_write,
        "blocks_moved": manager.num_moved,
        **manager.swap_space.stats(),
        **states,
    }


def _state_figures(pool: BlockPool) -> dict[str, int]:
    return {
        "state_slots_total": pool.num_blocks,
        "state_slots_used": pool.num_used,
        "state_slots_cached": pool.num_cached,
        "state_slots_free": pool.num_free,
        "state_slots_used_peak": pool.peak_used,
        "state_slots_evicted": pool.evictions,
    }


def _filled(manager: BlockManager) -> tuple[int, int]:
    """Return the token slots in use and all token slots of the blocks in tables.

    Only the last block of a table can have empty token slots. So the blocks need no individual check, unless one of
    these is also in another table, which may have filled it.
    """
    size = manager.block_size
    slots = sum(pool.num_used for pool in manager.token_pools) * size
    missing = 0
    for g, pool in enumerate(manager.token_pools):
        for sequence in manager.sequences.values():
            table = sequence.tables[g]
            count = len(table) * size - sequence.num_tokens
            if count:
                if table[-1] == NULL_BLOCK or pool.refs(table[-1]) > 1:
                    return _filled_block_by_block(manager)
                missing += count
    return (
        (slots - missing, slots)
        if not (manager.copies.in_flight or manager.held)
        else _filled_block_by_block(manager)
    )


def _filled_block_by_block(manager: BlockManager) -> tuple[int, int]:
    """Return the same as ``_filled``, in O(table entries)."""
    filled: list[dict[int, int]] = [{} for _ in manager.token_pools]
    for sequence in manager.sequences.values():
        for known, table in zip(filled, sequence.tables, strict=False):  # not of slots, which come last
            for i, block in enumerate(table):
                tokens = min(manager.block_size, sequence.num_tokens - i * manager.block_size)
                known[block] = max(known.get(block, 0), tokens)
    for blocks in filled:
        blocks.pop(NULL_BLOCK, None)
    return sum(sum(blocks.values()) for blocks in filled), sum(map(len, filled)) * manager.block_size


def check(manager: BlockManager) -> None:
    """Verify every invariant, in O(blocks + table entries).

    Raises:
        RuntimeError: an invariant is broken; the message names it.
    """
    space = manager.swap_space
    holders = {pool: [0] * pool.num_blocks for pool in (*manager.pools, *space.pools)}
    if not manager.sequences.keys().isdisjoint(space):
        raise RuntimeError("a sequence is on the device and on the host at once")
    if any(space.num_tokens(request_id) < 1 for request_id in space):
        raise RuntimeError("a sequence without tokens is on the host")
    for request_id, sequence in manager.sequences.items():
        for g, (pool, table) in enumerate(zip(manager.pools, sequence.tables, strict=True)):
            _check_table(manager, request_id, g, table, sequence.num_tokens, holders[pool])
            if any(block != NULL_BLOCK for block in table[: sequence.num_null[g]]):
                raise RuntimeError(f"table {g} of {request_id!r} holds blocks that left the window")
        if (target := sequence.state_target) != NULL_BLOCK:
            _check_target(manager.pools[-1], request_id, target)
            holders[manager.pools[-1]][target] += 1
    for request_id in space:
        for g, (pool, table) in enumerate(zip(space.pools, space.tables(request_id), strict=True)):
            _check_table(manager, request_id, g, table, space.num_tokens(request_id), holders[pool])
    for pool, block in (*manager.copies.in_flight, *manager.held):
        holders[pool][block] += 1
    for pool, lent in zip(space.pools, space.lent, strict=True):
        for block in lent:
            holders[pool][block] += 1
    for pool, own in holders.items():
        pool.check(own)


def _check_target(pool: BlockPool, request_id: str, target: int) -> None:
    """Check that no other sequence holds the slot that a step writes, and that no hash leads to it."""
    if not pool.is_private(target):
        raise RuntimeError(f"{request_id!r} writes its state to slot {target}, which it does not own")


def _check_table(
    manager: BlockManager, request_id: str, group: int, table: list[int], num_tokens: int, holders: list[int]
) -> None:
    live = [block for block in table if block != NULL_BLOCK]
    if len(table) != manager.groups[group].length(num_tokens, manager.block_size):
        raise RuntimeError(f"table {group} of {request_id!r} has {len(table)} blocks for {num_tokens} tokens")
    if len(set(live)) != len(live):
        raise RuntimeError(f"table {group} of {request_id!r} contains a block twice: {table}")
    for block in live:
        if not 0 <= block < len(holders):
            raise RuntimeError(f"table {group} of {request_id!r} contains block {block} of {len(holders)}")
        holders[block] += 1
