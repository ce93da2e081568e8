"""Finds the first of many strings in a text that comes in pieces: the automaton of Aho and Corasick (CACM 1975)."""

from __future__ import annotations

from collections.abc import Iterable

_CHARACTER_BITS = 21
"""Large enough for any code point, so that a state and a character fit into one key."""


class StopStrings:
    """Strings to find, as one automaton: the cost of a character does not depend on the number of strings.

    A state stands for the longest suffix of the text that begins one of the strings; state 0 is the empty suffix. The
    reader of a text keeps its state and passes it with the next piece, so one automaton serves many texts.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: dict[int, int] = {}
        parents, characters, depths, grows = [0], [0], [0], [False]
        found = [""]
        for string in strings:
            state = 0
            for character in map(ord, string):
                key = state << _CHARACTER_BITS | character
                following = self._next.get(key)
                if following is None:
                    following = self._next[key] = len(parents)
                    grows[state] = True
                    parents.append(state)
                    characters.append(character)
                    depths.append(depths[state] + 1)
                    grows.append(False)
                    found.append("")
                state = following
            found[state] = string
        self._shorter = [0] * len(parents)
        self._found = found
        """By state: the longest string that ends there; empty if none does."""
        self._pending = [0] * len(parents)
        """By state: the length of the longest suffix of the text that begins a string without completing it."""
        for state in sorted(range(1, len(parents)), key=depths.__getitem__):
            shorter = self._follow(self._shorter[parents[state]], characters[state]) if parents[state] else 0
            self._shorter[state] = shorter
            found[state] = found[state] or found[shorter]
            self._pending[state] = depths[state] if grows[state] else self._pending[shorter]

    def read(self, state: int, text: str, *, look: bool = True) -> tuple[int, int, str]:
        """Read the next piece of a text.

        Args:
            state: the state after the previous piece; 0 at the beginning.
            text: the piece.
            look: find strings that end in this piece; if False, they are passed over.

        Returns:
            The new state; the number of characters read, which is all unless a string was found; and the string that
            is complete first (the longest, if several end together), or "".
        """
        for count, character in enumerate(map(ord, text), start=1):
            state = self._follow(state, character)
            if look and self._found[state]:
                return state, count, self._found[state]
        return state, len(text), ""

    def pending(self, state: int) -> int:
        """Return the number of final characters of the text that more text could complete to one of the strings."""
        return self._pending[state]

    def _follow(self, state: int, character: int) -> int:
        following = self._next.get(state << _CHARACTER_BITS | character)
        while following is None and state:
            state = self._shorter[state]
            following = self._next.get(state << _CHARACTER_BITS | character)
        return following or 0
