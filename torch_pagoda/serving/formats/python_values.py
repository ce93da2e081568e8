"""Values in Python's notation, which models write instead of JSON."""

from __future__ import annotations

import re
from typing import Any

from .source import MAX_DEPTH, Malformed, load_json

_NAME = re.compile(r"[A-Za-z_][\w.:/-]*", re.ASCII)
_STRING = re.compile(r"""'((?:[^\\']|\\.)*)'|"((?:[^\\"]|\\.)*)\"""", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d{1,4000}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}


def python_value(text: str) -> Any:
    """The value of a literal; tuples become lists, and JSON's ``true``, ``false`` and ``null`` are accepted, too.

    Raises:
        Malformed: it is not a literal.
    """
    source = PythonText(text.strip())
    value = source.value()
    if not source.at_end:
        raise source.malformed("the end")
    return value


class PythonText:
    """A reader of Python: names, marks and literals; it skips white space between them.

    All methods that read raise ``Malformed`` if something else follows.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0

    @property
    def at_end(self) -> bool:
        """Whether all text has been read."""
        return self._pos >= len(self._text)

    def malformed(self, wanted: str) -> Malformed:
        """The error for a missing element at this position."""
        return Malformed(f"expected {wanted} at {self._text[self._pos : self._pos + 20]!r}")

    def value(self, depth: int = 0) -> Any:
        """A literal."""
        if depth > MAX_DEPTH:
            raise Malformed(f"brackets are nested deeper than {MAX_DEPTH} levels")
        for opener, closer in ("[]", "()"):
            if self.accept(opener):
                return self._values(closer, depth)
        if self.accept("{"):
            return self._entries(depth)
        if text := self._match(_STRING):
            return _ESCAPE.sub(_unescape, text[1:-1])
        if text := self._match(_NUMBER):
            return int(text) if text.lstrip("+-").isdecimal() else load_json(repr(float(text)))
        word = self.name()
        if word not in _WORDS:
            raise Malformed(f"{word[:20]!r} is not a value")
        return _WORDS[word]

    def name(self) -> str:
        """A name, which may contain dots, colons, slashes and hyphens."""
        name = self._match(_NAME)
        if not name:
            raise self.malformed("name")
        return name

    def accept(self, mark: str) -> bool:
        """Skip the mark if it follows."""
        if not self._text.startswith(mark, self._pos):
            return False
        self._pos += len(mark)
        self._space()
        return True

    def expect(self, mark: str) -> None:
        """Skip the mark, which must follow."""
        if not self.accept(mark):
            raise self.malformed(mark)

    def _entries(self, depth: int) -> dict[str, Any]:
        entries = {}
        while not self.accept("}"):
            key = self.value(depth + 1)
            self.expect(":")
            entries[key if isinstance(key, str) else str(key)] = self.value(depth + 1)
            if not self.accept(","):
                self.expect("}")
                break
        return entries

    def _values(self, closer: str, depth: int) -> list[Any]:
        values = []
        while not self.accept(closer):
            values.append(self.value(depth + 1))
            if not self.accept(","):
                self.expect(closer)
                break
        return values

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._pos)
        self._pos = found.end() if found else self._pos
        self._space()
        return found.group() if found else ""

    def _space(self) -> None:
        while self._text[self._pos : self._pos + 1].isspace():
            self._pos += 1


def _unescape(escape: re.Match[str]) -> str:
    for digits in escape.groups()[:3]:
        if digits is not None:
            return chr(int(digits, 16)) if int(digits, 16) <= 0x10FFFF else escape.group()
    return escape[4] if escape[4] in "\\'\"" else _ESCAPED.get(escape[4], escape.group())
