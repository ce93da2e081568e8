"""Text that arrives in pieces, read by generators that pause where it has not come yet.

A reader of a format is written as if all of its text were there. Each of the methods below is a generator to be used
with ``yield from``: it yields None while it needs more text and returns what it has read. What it returns depends on
the text only, never on how it was cut; no character is looked at more than a few times.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as it was read; ``id`` where the model writes one.

    Attributes:
        known_only: it counts only if it names one of the request's tools (its format has no marker of its own).
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    known_only: bool = False


Steps: TypeAlias = Generator[list[ParsedCall] | None, None, T]
"""Yields calls when they are complete, those of an array together, and None to wait for text; returns what was read.
"""

MAX_DEPTH = 64
"""Brackets within each other in the arguments of a call."""

_SPACE = re.compile(r"\s*")
_JSON_OUTSIDE = re.compile(r'[\s,:0-9E+\-.a-z]*(?:(["{}\[\]])|\Z|(?P<illegal>.))', re.DOTALL)
_PYTHON_OUTSIDE = re.compile(r"""[^"'{}\[\]()]*(?:(["'{}\[\]()])|\Z)""", re.DOTALL)
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*(?:([\\{quote}])|\Z)", re.DOTALL) for quote in "\"'"}
_CLOSER = {"{": "}", "[": "]", "(": ")"}


class Malformed(ValueError):
    """The text is not a call of the format; read as far as ``Source.pos``."""


class Source:
    """Text up to now.

    Attributes:
        text: what has come and is still needed.
        pos: up to where it has been read.
        ended: nothing follows.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False

    @property
    def at_end(self) -> bool:
        """Whether all of the text was read and nothing follows."""
        return self.ended and self.pos >= len(self.text)

    def forget(self) -> None:
        """Drop what has been read, once that is most of the text: so a character is moved once or twice."""
        if self.pos * 2 >= len(self.text):
            self.text, self.pos = self.text[self.pos :], 0

    def space(self) -> Steps[None]:
        """Pass over white space."""
        while True:
            self.pos = _end(_SPACE, self.text, self.pos)
            if self.pos < len(self.text) or self.ended:
                return
            yield None

    def peek(self, *literals: str) -> Steps[str | None]:
        """The longest of the literals that stands here, not passed over; None where none does."""
        while True:
            rest = self.text[self.pos : self.pos + max(map(len, literals))]
            if self.ended or not any(len(literal) > len(rest) and literal.startswith(rest) for literal in literals):
                return max((literal for literal in literals if rest.startswith(literal)), key=len, default=None)
            yield None

    def accept(self, *literals: str) -> Steps[str | None]:
        """As ``peek``, and passes over it."""
        found = yield from self.peek(*literals)
        self.pos += len(found or "")
        return found

    def expect(self, *literals: str) -> Steps[str]:
        """As ``accept``; one of them has to stand here."""
        found = yield from self.accept(*literals)
        if found is None:
            raise Malformed(f"none of {literals} at {self.text[self.pos : self.pos + 20]!r}")
        return found

    def until(self, *literals: str) -> Steps[tuple[str, str]]:
        """Text before the first of the literals, which is passed over, and that literal.

        None of them may lie within another.
        """
        pattern, overlap = _any_of(literals), max(map(len, literals)) - 1
        start = begin = self.pos
        while True:
            if found := pattern.search(self.text, begin):
                self.pos = found.end()
                return self.text[start : found.start()], found.group()
            if self.ended:
                self.pos = len(self.text)
                raise Malformed(f"none of {literals} up to the end")
            begin = max(start, len(self.text) - overlap)
            yield None

    def another(self, opener: str, closer: str) -> Steps[bool]:
        """Pass over the opener of a section's next call; False where the section or the text ends."""
        yield from self.space()
        return not self.at_end and (yield from self.expect(opener, closer)) == opener

    def value(self, closer: str, followers: tuple[str, ...], missing: MissingCloser | None = None) -> Steps[str]:
        """Text before ``closer``; one that neither a follower nor the end comes after belongs to the text.

        White space may stand in between. So a value can hold its own closer, as text about the format does.

        Args:
            closer: of the value.
            followers: what may stand behind the closer.
            missing: how it is known that the model left the closer out; None: it is not looked for.
        """
        start = self.pos
        ends = (missing.opener, missing.end) if missing else ()
        while True:
            _, mark = yield from self.until(closer, *ends)
            begin, end = self.pos - len(mark), self.pos
            if mark == closer:
                yield from self.space()
                is_end = self.at_end or (yield from self.peek(*followers)) is not None
                begin, end = (begin, self.pos) if is_end else (begin, end)
            else:
                assert missing is not None
                is_end = yield from missing.is_here(self, mark)
                if is_end:
                    end, begin = begin, begin - self.text.endswith("\n", start, begin) * missing.ends_lines
            self.pos = end
            if is_end:
                return self.text[start:begin]

    def stray_closers(self, *followers: str) -> Steps[None]:
        """Pass over white space, and closing brackets that are too many if a follower or the end comes after them."""
        start = self.pos
        while True:
            yield from self.space()
            if self.text[self.pos : self.pos + 1] not in ("}", "]"):
                break
            self.pos += 1
        if not self.at_end and (not followers or (yield from self.peek(*followers)) is None):
            self.pos = start
            yield from self.space()

    def json(self) -> Steps[Any]:
        """A JSON object or array. Control characters may stand in strings as they are; NaN and infinities may not."""
        text = yield from self._balanced("{[", _JSON_OUTSIDE)
        return load_json(text)

    def python(self) -> Steps[str]:
        """Text of a bracketed Python expression."""
        return (yield from self._balanced("[", _PYTHON_OUTSIDE))

    def _balanced(self, openers: str, outside: re.Pattern[str]) -> Steps[str]:
        """Text from one of the brackets here to the one that closes it, strings with escapes passed over."""
        start = self.pos
        yield from self.peek(*openers)
        if self.text[start : start + 1] not in tuple(openers):
            raise Malformed(f"no {openers[0]} at {self.text[start : start + 20]!r}")
        closers: list[str] = []
        quote = ""
        while True:
            if self.pos >= len(self.text):
                if self.ended:
                    raise Malformed("a bracket is not closed")
                yield None
                continue
            match = (_IN_STRING[quote] if quote else outside).match(self.text, self.pos)
            assert match is not None
            found = match.group(1)
            if match.lastgroup == "illegal":
                self.pos = match.end() - 1
                raise Malformed(f"{self.text[self.pos]!r} outside of strings")
            if found is None:
                self.pos = match.end()
            elif found == "\\":
                while len(self.text) == match.end() and not self.ended:
                    yield None
                self.pos = min(match.end() + 1, len(self.text))
            else:
                self.pos = match.end()
                if quote:
                    quote = ""
                elif found in "\"'":
                    quote = found
                elif found in _CLOSER:
                    closers.append(_CLOSER[found])
                    if len(closers) > MAX_DEPTH:
                        raise Malformed(f"more than {MAX_DEPTH} brackets within each other")
                elif closers.pop() != found:
                    raise Malformed(f"{found!r} closes another bracket")
                if not closers:
                    return self.text[start : self.pos]


@dataclass(frozen=True)
class MissingCloser:
    """How a value's end is known where the model left its closer out.

    Attributes:
        opener: before the name of another argument.
        end: of the call.
        is_next: whether an argument of this name may come now.
        behind_end: what comes behind the end of a call, if not the end of all text.
        ends_lines: the line break before what ends a value is none of the value's.
    """

    opener: str
    end: str
    is_next: Callable[[str], bool]
    behind_end: tuple[str, ...]
    ends_lines: bool = True

    def is_here(self, source: Source, mark: str) -> Steps[bool]:
        """Whether the value ended at a mark, one of the two, that was just passed over."""
        if mark == self.end:
            yield from source.space()
            return source.at_end or (yield from source.peek(*self.behind_end)) is not None
        while True:
            name = _ARGUMENT_NAME.match(source.text, source.pos)
            if name is not None and (name.end() < len(source.text) or source.ended or len(name.group()) == MAX_NAME):
                return self.is_next(name[1])
            yield None


MAX_NAME = 256
"""Characters between the opener of an argument and the end of its name."""

_ARGUMENT_NAME = re.compile(rf"""(?=["']?([^<>"']{{0,{MAX_NAME}}}))[^<>]{{0,{MAX_NAME}}}""")


def load_json(text: str) -> Any:
    """The value of JSON text; control characters may stand in strings as they are.

    Raises:
        Malformed: it is none, or holds a number that JSON cannot.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


def _refuse(text: str) -> float:
    raise Malformed(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise Malformed(f"{text} is too large")
    return number


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    match = pattern.match(text, pos)
    return match.end() if match else pos


@lru_cache(maxsize=256)
def _any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(literal) for literal in sorted(literals, key=len, reverse=True)))
