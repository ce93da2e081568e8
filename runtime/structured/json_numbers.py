"""Limits the length of numbers in generated JSON, which no schema limits and weak models never end."""

from __future__ import annotations

import copy
from typing import Protocol

from .vocabulary import MAX_DIGITS, MAX_EXPONENT_DIGITS

_DIGITS = frozenset(b"0123456789")
_QUOTE, _BACKSLASH = b'"\\'


class NumberLengths(Protocol):
    """Follows a text as it is written."""

    def feed(self, text: bytes) -> None:
        """Take the bytes that come next."""
        ...

    @property
    def digits_left(self) -> int | None:
        """Digits that may follow; None for any number of them."""
        ...

    def copy(self) -> NumberLengths:
        """One that goes on from here by itself."""
        ...


class JsonNumbers:
    """Counts the digits in a row at the end of JSON text; those within its strings do not count."""

    __slots__ = ("_in_exponent", "_in_string", "_is_escaped", "_run")

    def __init__(self) -> None:
        self._in_string = self._is_escaped = self._in_exponent = False
        self._run = 0

    def copy(self) -> JsonNumbers:
        """One that goes on from here by itself."""
        return copy.copy(self)

    @property
    def in_string(self) -> bool:
        """A string is being written."""
        return self._in_string

    def feed(self, text: bytes) -> None:
        """Take the bytes that come next."""
        for byte in text:
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif byte == _BACKSLASH:
                    self._is_escaped = True
                elif byte == _QUOTE:
                    self._in_string = False
            elif byte in _DIGITS:
                self._run += 1
            else:
                self._run = 0
                self._in_string = byte == _QUOTE
                self._in_exponent = byte in b"eE" or (self._in_exponent and byte in b"+-")

    @property
    def digits_left(self) -> int | None:
        """Digits that may follow; None where no number is being written, or one with a short exponent or none."""
        if self._in_exponent:
            return max(MAX_EXPONENT_DIGITS - self._run, 0)
        return max(MAX_DIGITS - self._run, 0) if self._run else None
