"""The interface of stores of KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockStore(Protocol):
    """Keeps entries (see ``entries``) by key, for this process, later ones and others.

    What it holds was written by somebody else: it returns an entry only if the seal says that it is what was stored
    under this key. No method raises because the store is away, slow, full or damaged. Each may take long; one thread
    reads and another one writes.

    Attributes:
        num_damaged: entries that were found and could not be used: torn, changed, or of somebody else.
    """

    num_damaged: int

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which of the keys seem to have an entry."""

    def load(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Read the entries of keys.

        Args:
            keys: of the entries.
            into: gets their contents, each of the size that is expected.

        Returns:
            For each whether it was read. Where it was not (absent, damaged, not ours, or the store is away) ``into``
            holds anything.
        """

    def store(self, keys: Sequence[bytes], parts: Sequence[memoryview]) -> int:
        """Write entries; one that is there stays as it is. Returns the bytes written."""

    def close(self) -> None:
        """Let go of files and connections."""
