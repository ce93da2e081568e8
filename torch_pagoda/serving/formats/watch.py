"""Marks in text that is still growing."""

from __future__ import annotations

import re
from functools import lru_cache


class Watch:
    """Finds marks in text that is still growing."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        ordered = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._beginnings = {mark[:i] for mark in ordered for i in range(1, len(mark))}
        self._firsts = {mark[0] for mark in ordered}
        self._longest = max(map(len, ordered), default=1)

    def search(self, text: str, pos: int) -> re.Match[str] | None:
        """The first mark from ``pos`` on."""
        return self._pattern.search(text, pos)

    def match(self, text: str, pos: int) -> str | None:
        """The mark at ``pos``."""
        found = self._pattern.match(text, pos)
        return found.group() if found else None

    def may_begin(self, text: str, pos: int) -> bool:
        """Whether the text from ``pos`` on is the beginning of a mark."""
        return len(text) - pos < self._longest and text[pos:] in self._beginnings

    def held(self, text: str, pos: int) -> int:
        """Position from which the end of the text may be the beginning of a mark; the text's length if it cannot."""
        for start in range(max(pos, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts and text[start:] in self._beginnings:
                return start
        return len(text)


@lru_cache(maxsize=64)
def watch(marks: tuple[str, ...]) -> Watch:
    """The marks shared by all completions of a format."""
    return Watch(marks)
