from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torch_pagoda.runtime.block_manager import BlockManager, OutOfBlocks, SharedBlock


def test_blocks_come_in_order_and_tables_grow():
    blocks = BlockManager(8, 4)
    assert blocks.allocate("a", 5) == [0, 1]
    assert blocks.allocate("a", 8) == []
    assert blocks.allocate("a", 9) == [2]
    assert blocks.allocate("a", 3) == []
    assert blocks.table("a") == [0, 1, 2]
    assert (blocks.num_tokens("a"), blocks.num_free_blocks, blocks.num_used_blocks) == (9, 5, 3)
    blocks.check()


def test_freed_blocks_are_reused_first_and_in_their_old_order():
    blocks = BlockManager(100, 4)
    blocks.allocate("a", 12)
    blocks.allocate("b", 4)
    blocks.free("a")
    assert blocks.allocate("c", 12) == [0, 1, 2]
    blocks.check()


def test_the_last_block_can_be_taken_and_no_more():
    blocks = BlockManager(3, 4)
    assert blocks.allocate("a", 12) == [0, 1, 2]
    assert blocks.num_free_blocks == 0
    with pytest.raises(OutOfBlocks, match=r"'b' needs 1 more blocks.*0 of 3 are free"):
        blocks.allocate("b", 1)
    assert "b" not in blocks
    with pytest.raises(OutOfBlocks):
        blocks.allocate("a", 13)
    assert blocks.num_tokens("a") == 12
    blocks.check()


def test_questions():
    blocks = BlockManager(4, 4)
    blocks.allocate("a", 6)
    assert [blocks.blocks_needed("a", n) for n in (1, 8, 9, 17)] == [0, 0, 1, 3]
    assert [blocks.blocks_needed("new", n) for n in (1, 4, 5)] == [1, 1, 2]
    assert (blocks.tokens_free("a"), blocks.tokens_free("new")) == (16, 8)
    assert blocks.capacity == 16


def test_forks_share_until_one_writes():
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 6)
    blocks.fork("a", "b")
    assert blocks.table("b") == blocks.table("a") == [0, 1]
    assert blocks.num_used_blocks == 2
    for writer in ("a", "b"):
        with pytest.raises(SharedBlock, match="block 1"):
            blocks.allocate(writer, 7)
    assert blocks.allocate("b", 6) == []
    blocks.free("a")
    assert blocks.num_used_blocks == 2
    assert blocks.allocate("b", 9) == [2]
    blocks.free("b")
    assert blocks.num_free_blocks == 8
    blocks.check()


def test_forks_of_full_blocks_grow_apart():
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 8)
    blocks.fork("a", "b")
    assert blocks.allocate("a", 9) == [2]
    assert blocks.allocate("b", 9) == [3]
    blocks.check()


def test_misuse_is_refused():
    blocks = BlockManager(4, 4)
    blocks.allocate("a", 1)
    for call in (lambda: blocks.free("x"), lambda: blocks.table("x"), lambda: blocks.fork("x", "y")):
        with pytest.raises(ValueError, match="'x' holds no blocks"):
            call()
    with pytest.raises(ValueError, match="already holds blocks"):
        blocks.fork("a", "a")
    with pytest.raises(ValueError, match="num_tokens=0"):
        blocks.allocate("a", 0)
    blocks.free("a")
    with pytest.raises(ValueError):
        blocks.free("a")
    for bad in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match="below 1"):
            BlockManager(*bad)
    blocks.check()


def test_a_returned_table_is_a_copy():
    blocks = BlockManager(4, 4)
    blocks.allocate("a", 4)
    blocks.table("a").append(3)
    assert blocks.table("a") == [0]


def test_stats():
    blocks = BlockManager(10, 4)
    assert blocks.stats()["internal_fragmentation"] == 0
    blocks.allocate("a", 6)
    blocks.fork("a", "b")
    blocks.allocate("c", 4)
    stats = blocks.stats()
    assert (stats["blocks_total"], stats["blocks_used"], stats["blocks_free"]) == (10, 3, 7)
    assert stats["utilisation"] == pytest.approx(0.3)
    assert stats["internal_fragmentation"] == pytest.approx(2 / 12)
    for name in "abc":
        blocks.free(name)
    assert blocks.stats()["blocks_used_peak"] == 3


def test_reset_frees_everything():
    blocks = BlockManager(4, 4)
    blocks.allocate("a", 16)
    blocks.reset()
    assert blocks.num_free_blocks == 4 and "a" not in blocks
    blocks.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b._free.append(0), "free list"),
        (lambda b: b._free.append(b._free[0]), "twice"),
        (lambda b: b._free.pop(), "free list"),
        (lambda b: b._refs.__setitem__(0, 2), "reference counts"),
        (lambda b: b._tables["a"].append(0), "twice"),
        (lambda b: b._tables["a"].append(99), "names block 99"),
        (lambda b: b._tables["a"].pop(), "blocks for"),
        (lambda b: b._tables.__setitem__("b", [0, 1]), "blocks for"),
        (lambda b: b._tokens.__setitem__("b", 3), "different requests"),
    ],
)
def test_check_notices_damage(damage, message):
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 6)
    blocks.check()
    damage(blocks)
    with pytest.raises(RuntimeError, match=message):
        blocks.check()


class BlockManagerMachine(RuleBasedStateMachine):
    """Random operations on the manager and on a naive model of it."""

    NAMES = st.sampled_from("abcdef")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.blocks = BlockManager(num_blocks, block_size)
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}

    def used(self):
        return {b for table in self.tables.values() for b in table}

    @rule(name=NAMES, num_tokens=st.integers(1, 30))
    def allocate(self, name, num_tokens):
        size = self.blocks.block_size
        old = self.tables.get(name, [])
        tokens = self.tokens.get(name, 0)
        count = max(0, -(-num_tokens // size) - len(old))
        free = self.blocks.num_blocks - len(self.used())
        assert self.blocks.blocks_needed(name, num_tokens) == count
        assert self.blocks.tokens_free(name) == (len(old) + free) * size
        holders = Counter(b for table in self.tables.values() for b in table)
        if num_tokens > tokens and tokens % size and holders[old[-1]] > 1:
            with pytest.raises(SharedBlock):
                self.blocks.allocate(name, num_tokens)
        elif count > free:
            with pytest.raises(OutOfBlocks):
                self.blocks.allocate(name, num_tokens)
        else:
            added = self.blocks.allocate(name, num_tokens)
            assert len(added) == len(set(added)) == count and not set(added) & self.used()
            self.tables[name] = old + added
            self.tokens[name] = max(tokens, num_tokens)

    @rule(name=NAMES)
    def free(self, name):
        if name in self.tables:
            self.blocks.free(name)
            del self.tables[name], self.tokens[name]
        else:
            with pytest.raises(ValueError):
                self.blocks.free(name)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), child=NAMES)
    def fork(self, data, child):
        parent = data.draw(st.sampled_from(sorted(self.tables)))
        if child in self.tables:
            with pytest.raises(ValueError):
                self.blocks.fork(parent, child)
        else:
            self.blocks.fork(parent, child)
            self.tables[child] = list(self.tables[parent])
            self.tokens[child] = self.tokens[parent]

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        assert {name: self.blocks.table(name) for name in self.tables} == self.tables
        assert {name: self.blocks.num_tokens(name) for name in self.tokens} == self.tokens
        assert self.blocks.num_used_blocks == len(self.used())
        assert self.blocks.num_free_blocks + self.blocks.num_used_blocks == self.blocks.num_blocks
        assert 0 <= self.blocks.stats()["internal_fragmentation"] < 1


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
