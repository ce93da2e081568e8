"""Limits the length of numbers in the JSON of structural tags, whose surrounding text may contain any digits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from .json_numbers import JsonNumbers

_SPACE = frozenset(b" \t\r\n")
_SCALAR = frozenset(b"0123456789+-.eE" + b"truefalsenull")
"""Of numbers, true, false and null."""
_MAX_READINGS = 32
"""Of one text; with more of them numbers are let go on."""


class Tag(NamedTuple):
    """One kind of tag: ``trigger``, ``rest`` of its beginning, JSON, ``end``."""

    trigger: bytes
    rest: bytes
    end: bytes


@dataclass(slots=True)
class _Value:
    """A JSON value under way."""

    numbers: JsonNumbers = field(default_factory=JsonNumbers)
    kind: Literal["", "scalar", "text", "brackets"] = ""
    depth: int = 0

    def feed(self, byte: int) -> Literal["goes on", "is whole", "has ended"]:
        """Take a byte; ``"has ended"``: it was none of the value's, which was whole before it."""
        if not self.kind:
            if byte in _SPACE:
                return "goes on"
            self.kind = "text" if byte == ord('"') else "brackets" if byte in b"{[" else "scalar"
        if self.kind == "scalar" and byte not in _SCALAR:
            return "has ended"
        was_text = self.numbers.in_string
        self.numbers.feed(bytes((byte,)))
        if self.kind == "text":
            return "is whole" if was_text and not self.numbers.in_string else "goes on"
        if not was_text:
            self.depth += (byte in b"{[") - (byte in b"}]")
        return "is whole" if self.kind == "brackets" and not self.depth else "goes on"


@dataclass(slots=True)
class _Place:
    """One way to read the text so far.

    Attributes:
        tag: the one that it is in; None: in text.
        seen: of the text; of the tag's ``rest`` or ``end``.
        value: of the tag, from the end of its ``rest`` to the beginning of its ``end``.
        is_behind: the value is whole.
    """

    tag: Tag | None = None
    seen: bytes = b""
    value: _Value | None = None
    is_behind: bool = False


class TagNumbers:
    """Counts digits as ``JsonNumbers`` does, within tags only.

    Where the text can be read in several ways (tags whose beginnings begin with each other, a number before an end
    that begins with a digit), as many digits may follow as the most generous of them leaves.

    Args:
        tags: that the text may hold. Triggers are found as early as they end.
    """

    __slots__ = ("_is_lost", "_longest", "_places", "_tags")

    def __init__(self, tags: Sequence[Tag]) -> None:
        self._tags = tags
        self._longest = max(len(tag.trigger) for tag in tags)
        self._places = [_Place()]
        self._is_lost = False

    def feed(self, text: bytes) -> None:
        """Take the bytes that come next."""
        for byte in text:
            if self._is_lost:
                return
            self._places = [after for place in self._places for after in self._step(place, byte)]
            self._is_lost = not 0 < len(self._places) <= _MAX_READINGS

    def copy(self) -> TagNumbers:
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._places = [replace(place, value=copy.deepcopy(place.value)) for place in self._places]
        return other

    @property
    def digits_left(self) -> int | None:
        """Digits that may follow; None for any number."""
        if self._is_lost:
            return None
        most = 0
        for place in self._places:
            left = None if place.value is None or place.is_behind else place.value.numbers.digits_left
            if left is None:
                return None
            most = max(most, left)
        return most

    def _step(self, place: _Place, byte: int) -> list[_Place]:
        if place.tag is None:
            return self._in_text(place.seen, byte)
        if place.value is None or place.is_behind:
            return self._in_mark(place, byte)
        may_be_whole = place.value.kind == "scalar"
        after = place.value.feed(byte)
        if after == "is whole":
            return self._entered(_behind(place))
        if after == "has ended":
            return self._in_mark(_behind(place), byte)
        # What follows a number shows that it has ended, unless it could belong to the number, too.
        return [place, *self._in_mark(_behind(place), byte)] if may_be_whole else [place]

    def _in_text(self, seen: bytes, byte: int) -> list[_Place]:
        seen = (seen + bytes((byte,)))[-self._longest :]
        opened = [tag for tag in self._tags if seen.endswith(tag.trigger)]
        if not opened:
            return [_Place(seen=seen)]
        return [place for tag in opened for place in self._entered(_Place(tag))]

    def _in_mark(self, place: _Place, byte: int) -> list[_Place]:
        """In what stands before or behind the value."""
        tag = place.tag
        assert tag is not None
        mark = tag.end if place.is_behind else tag.rest
        if not mark:
            return self._in_text(b"", byte)
        seen = place.seen + bytes((byte,))
        return self._entered(_Place(tag, seen, place.value, place.is_behind)) if mark.startswith(seen) else []

    def _entered(self, place: _Place) -> list[_Place]:
        """The place, or the one behind its mark where that is whole."""
        tag = place.tag
        assert tag is not None
        if place.seen != (tag.end if place.is_behind else tag.rest):
            return [place]
        return [_Place()] if place.is_behind else [_Place(tag, value=_Value())]


def _behind(place: _Place) -> _Place:
    return _Place(place.tag, value=place.value, is_behind=True)
