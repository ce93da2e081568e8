"""Finds the first of many strings in a text that comes in pieces: the automaton of Aho and Corasick (CACM 1975)."""

from __future__ import annotations

from collections.abc import Iterable

_CHARACTER_BITS = 21
"""A code point fits; a state and a character together are one key."""


class StopStrings:
    """Strings to look for, as one automaton: the cost of a character does not depend on how many there are.

    A state stands for the longest end of the text that begins one of the strings; state 0 is the empty end. Whoever
    reads a text keeps its state and hands it back with the next piece, so that one automaton serves many texts.

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
        """By state: the longest string that ends there; empty for none."""
        self._pending = [0] * len(parents)
        """By state: the length of the longest end of the text that begins a string and is not all of it."""
        for state in sorted(range(1, len(parents)), key=depths.__getitem__):
            shorter = self._follow(self._shorter[parents[state]], characters[state]) if parents[state] else 0
            self._shorter[state] = shorter
            found[state] = found[state] or found[shorter]
            self._pending[state] = depths[state] if grows[state] else self._pending[shorter]

    def read(self, state: int, text: str, *, look: bool = True) -> tuple[int, int, str]:
        """Read the next piece of a text.

        Args:
            state: what the last piece led to; 0 at the beginning.
            text: the piece.
            look: for strings that end in it; else they are passed over.

        Returns:
            The new state; how many characters were read, all unless a string was found; and the string that is
            complete first, of several that end together the longest, or "".
        """
        for count, character in enumerate(map(ord, text), start=1):
            state = self._follow(state, character)
            if look and self._found[state]:
                return state, count, self._found[state]
        return state, len(text), ""

    def pending(self, state: int) -> int:
        """Characters at the end of the text that more text could complete to one of the strings."""
        return self._pending[state]

    def _follow(self, state: int, character: int) -> int:
        following = self._next.get(state << _CHARACTER_BITS | character)
        while following is None and state:
            state = self._shorter[state]
            following = self._next.get(state << _CHARACTER_BITS | character)
        return following or 0
