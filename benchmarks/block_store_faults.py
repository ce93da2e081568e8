"""Stores that fail, and entries that are wrong, for block_store_soak.py."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_pagoda.runtime.block_store.entries import HEAD_SIZE, Seal, entry_key
from torch_pagoda.runtime.block_store.store import BlockStore

STORES = ("away", "dies", "slow", "full")
"""What a store does."""
ENTRIES = (
    *("truncated", "garbage", "a bit", "another block's", "forged"),
    *("a block missing", "a group missing", "a head missing", "a snapshot missing"),
)
"""What happens to the entries of a folder between two engines."""


class FaultyStore:
    """A store that fails in one way.

    Args:
        inner: the store.
        fault: one of ``STORES``: away from the start; away after a few calls, in the middle of one that reads; slow;
            or full after a while.
        draw: says when.
    """

    def __init__(self, inner: BlockStore, fault: str, draw: random.Random) -> None:
        self._inner, self._draw = inner, draw
        self._slow = fault == "slow"
        self._calls = self._loads = self._room = float("inf")  # that it answers, whole ones, and that it has room for
        if fault == "away":
            self._calls = 0
        elif fault == "dies" and draw.random() < 0.7:
            self._loads = draw.randrange(3)
        elif fault == "dies":
            self._calls = draw.randrange(1, 12)
        elif fault == "full":
            self._room = draw.randrange(40)

    @property
    def num_damaged(self) -> int:
        return self._inner.num_damaged

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.known(keys) if self._answers() else [False] * len(keys)

    def load(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        results, whole = [False] * len(keys), 0
        if self._answers():
            results, whole = self._inner.load(keys, into), len(keys)
            self._loads -= 1
            if not self._calls or self._loads < 0:
                self._calls, whole = 0, self._draw.randrange(len(keys))
        for part in into[whole:]:
            part[:] = self._draw.randbytes(part.nbytes)
        return [*results[:whole], *[False] * (len(keys) - whole)]

    def store(self, keys: Sequence[bytes], parts: Sequence[memoryview]) -> int:
        self._room -= 1
        return self._inner.store(keys, parts) if self._answers() and self._room >= 0 else 0

    def close(self) -> None:
        self._inner.close()

    def _answers(self) -> bool:
        if self._slow:
            time.sleep(self._draw.choice([0.001, 0.01, 0.03]))
        self._calls -= 1
        return self._calls >= 0


@dataclass(frozen=True)
class Entry:
    """An entry of a folder.

    Attributes:
        content: hash of its block.
        group: of layers.
        head: KV head.
        path: of its file.
    """

    content: bytes
    group: int
    head: int
    path: Path

    @property
    def key(self) -> bytes:
        return entry_key(self.content, self.group, self.head)


def damage(
    fault: str, entries: Sequence[Entry], state: int | None, seal: Seal, draw: random.Random
) -> set[tuple[int, bytes]]:
    """Damage some entries of one prompt.

    Args:
        fault: one of ``ENTRIES``.
        entries: those that are there.
        state: the group of states, if there is one.
        seal: of the entries.
        draw: chooses.

    Returns:
        Group and hash of the blocks that are not whole any more.
    """
    if not entries:
        return set()
    if fault.endswith("missing"):
        chosen = _missing(fault, entries, state, draw)
        for entry in chosen:
            entry.path.unlink()
    else:
        chosen = draw.sample(entries, min(len(entries), draw.choice([1, 3, len(entries)])))
        wholes = {entry: entry.path.read_bytes() for entry in entries}
        for entry in chosen:
            other = draw.choice([each for each in entries if each is not entry] or [entry])
            entry.path.write_bytes(_WRONG[fault](entry, wholes[entry], wholes[other], seal, draw))
        chosen = [entry for entry in chosen if entry.path.read_bytes() != wholes[entry]]
    return {(entry.group, entry.content) for entry in chosen}


def _missing(fault: str, entries: Sequence[Entry], state: int | None, draw: random.Random) -> list[Entry]:
    """Entries that are to be removed."""
    one = draw.choice([each for each in entries if each.group == state or fault != "a snapshot missing"])
    everywhere = draw.random() < 0.3
    if fault == "a block missing":
        return [each for each in entries if each.content == one.content]
    alike = [each for each in entries if each.group == one.group and (everywhere or each.content == one.content)]
    return [each for each in alike if each.head == one.head] if fault == "a head missing" else alike


def _forged(entry: Entry, whole: bytes, other: bytes, seal: Seal, draw: random.Random) -> bytes:
    """Other numbers, sealed by whoever lacks the secret."""
    content = whole[HEAD_SIZE:]
    content = content[len(content) // 2 :] + content[: len(content) // 2]
    secret = draw.choice([b"", draw.randbytes(32)])
    return Seal(seal._fingerprint, secret).head(entry.key, memoryview(content)) + content


def _flipped(entry: Entry, whole: bytes, other: bytes, seal: Seal, draw: random.Random) -> bytes:
    at = draw.randrange(len(whole))
    return whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]


_WRONG: dict[str, Callable[[Entry, bytes, bytes, Seal, random.Random], bytes]] = {
    "truncated": lambda entry, whole, other, seal, draw: whole[: draw.randrange(len(whole))],
    "garbage": lambda entry, whole, other, seal, draw: draw.randbytes(len(whole)),
    "a bit": _flipped,
    "another block's": lambda entry, whole, other, seal, draw: other,
    "forged": _forged,
}
"""Fault → the bytes of an entry instead of its own and of another one's."""
