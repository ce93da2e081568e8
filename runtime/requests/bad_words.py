"""Token sequences that may not be generated, and the tokens that would complete one of them next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Ids: TypeAlias = "npt.NDArray[np.int64]"


class _Node:
    """A node of the tree of sequences, read backwards from the end of an output.

    Attributes:
        longer: child nodes, by the preceding token.
        last: tokens that complete a sequence here.
    """

    __slots__ = ("last", "longer")

    def __init__(self) -> None:
        self.longer: dict[int, _Node] = {}
        self.last: _Ids | None = None


class BadWords:
    """The sequences as a tree from their ends: the cost of a look-up depends on the match, not on their number.

    Immutable, so requests may share it.

    Args:
        sequences: none of them empty.

    Attributes:
        token_ids: the sequences.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self.token_ids = tuple(tuple(sequence) for sequence in sequences)
        last: dict[tuple[int, ...], list[int]] = {}
        for sequence in self.token_ids:
            last.setdefault(sequence[:-1], []).append(sequence[-1])
        self._root = _Node()
        for beginning, completing in last.items():
            node = self._root
            for token in reversed(beginning):
                node = node.longer.setdefault(token, _Node())
            node.last = np.array(completing, np.int64)

    def completing(self, output_token_ids: Sequence[int]) -> list[_Ids]:
        """Return the tokens that would complete a sequence after this output, in parts."""
        node, parts = self._root, []
        if node.last is not None:
            parts.append(node.last)
        for token in reversed(output_token_ids):
            following = node.longer.get(token)
            if following is None:
                break
            node = following
            if node.last is not None:
                parts.append(node.last)
        return parts
