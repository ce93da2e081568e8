"""Text that arrives in pieces, read by generators that pause until more arrives.

A reader of a format is written as if all of its text were there. Each method below is a generator for ``yield from``:
it yields None while it needs more text and returns the text it read. The result depends on the text only, never on
how it was cut; each character is examined at most a few times.
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
    """A parsed call; ``id`` if the model wrote one.

    Attributes:
        known_only: the call counts only if it names a tool of the request (its format has no marker).
    """

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    known_only: bool = False


Steps: TypeAlias = Generator[list[ParsedCall] | None, None, T]
"""Yields calls when they are complete, those of an array together, and None to wait for text.
"""

MAX_DEPTH = 64
"""Maximum depth of brackets in the arguments of a call."""

_SPACE = re.compile(r"\s*")
_JSON_OUTSIDE = re.compile(r'[\s,:0-9E+\-.a-z]*(?:(["{}\[\]])|\Z|(?P<illegal>.))', re.DOTALL)
_PYTHON_OUTSIDE = re.compile(r"""[^"'{}\[\]()]*(?:(["'{}\[\]()])|\Z)""", re.DOTALL)
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*(?:([\\{quote}])|\Z)", re.DOTALL) for quote in "\"'"}
_CLOSER = {"{": "}", "[": "]", "(": ")"}


class Malformed(ValueError):
    """The text is not a call of the format; it was read up to ``Source.pos``."""


class Source:
    """The text received so far.

    Attributes:
        text: received text that is still needed.
        pos: end of the text that has been read.
        ended: no more text follows.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False

    @property
    def at_end(self) -> bool:
        """Whether all text was read and no more follows."""
        return self.ended and self.pos >= len(self.text)

    def forget(self) -> None:
        """Drop read text once it is most of the text, so that a character is moved at most twice."""
        if self.pos * 2 >= len(self.text):
            self.text, self.pos = self.text[self.pos :], 0

    def space(self) -> Steps[None]:
        """Skip white space."""
        while True:
            self.pos = _end(_SPACE, self.text, self.pos)
            if self.pos < len(self.text) or self.ended:
                return
            yield None

    def peek(self, *literals: str) -> Steps[str | None]:
        """The longest of the literals that follows, without skipping it; None if none does."""
        while True:
            rest = self.text[self.pos : self.pos + max(map(len, literals))]
            if self.ended or not any(len(literal) > len(rest) and literal.startswith(rest) for literal in literals):
                return max((literal for literal in literals if rest.startswith(literal)), key=len, default=None)
            yield None

    def accept(self, *literals: str) -> Steps[str | None]:
        """As ``peek``, but skips the literal."""
        found = yield from self.peek(*literals)
        self.pos += len(found or "")
        return found

    def expect(self, *literals: str) -> Steps[str]:
        """As ``accept``, but one of them must follow."""
        found = yield from self.accept(*literals)
        if found is None:
            raise Malformed(f"expected one of {literals} at {self.text[self.pos : self.pos + 20]!r}")
        return found

    def until(self, *literals: str) -> Steps[tuple[str, str]]:
        """Text before the first of the literals, and that literal, which is skipped.

        No literal may contain another.
        """
        pattern, overlap = _any_of(literals), max(map(len, literals)) - 1
        start = begin = self.pos
        while True:
            if found := pattern.search(self.text, begin):
                self.pos = found.end()
                return self.text[start : found.start()], found.group()
            if self.ended:
                self.pos = len(self.text)
                raise Malformed(f"none of {literals} before the end")
            begin = max(start, len(self.text) - overlap)
            yield None

    def another(self, opener: str, closer: str) -> Steps[bool]:
        """Skip the opener of a section's next call; returns False at the end of the section or the text."""
        yield from self.space()
        return not self.at_end and (yield from self.expect(opener, closer)) == opener

    def value(self, closer: str, followers: tuple[str, ...], missing: MissingCloser | None = None) -> Steps[str]:
        """Text before ``closer``; a closer counts only if a follower or the end comes after it.

        White space may separate them. So a value may contain its own closer, as text about the format does.

        Args:
            closer: ends the value.
            followers: texts that may follow the closer.
            missing: how to detect a closer that the model left out; None: do not.
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
        """Skip white space, and extra closing brackets if a follower or the end comes after them."""
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
        """A JSON object or array. Strings may contain raw control characters; NaN and infinities are rejected."""
        text = yield from self._balanced("{[", _JSON_OUTSIDE)
        return load_json(text)

    def python(self) -> Steps[str]:
        """Text of a bracketed Python expression."""
        return (yield from self._balanced("[", _PYTHON_OUTSIDE))

    def _balanced(self, openers: str, outside: re.Pattern[str]) -> Steps[str]:
        """Text from one of the brackets here to the matching one; skips strings with escapes."""
        start = self.pos
        yield from self.peek(*openers)
        if self.text[start : start + 1] not in tuple(openers):
            raise Malformed(f"expected {openers[0]} at {self.text[start : start + 20]!r}")
        closers: list[str] = []
        quote = ""
        while True:
            if self.pos >= len(self.text):
                if self.ended:
                    raise Malformed("unclosed bracket")
                yield None
                continue
            match = (_IN_STRING[quote] if quote else outside).match(self.text, self.pos)
            assert match is not None
            found = match.group(1)
            if match.lastgroup == "illegal":
                self.pos = match.end() - 1
                raise Malformed(f"{self.text[self.pos]!r} outside a string")
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
                        raise Malformed(f"brackets are nested deeper than {MAX_DEPTH} levels")
                elif closers.pop() != found:
                    raise Malformed(f"mismatched {found!r}")
                if not closers:
                    return self.text[start : self.pos]


@dataclass(frozen=True)
class MissingCloser:
    """Detects a value's end if the model left its closer out.

    Attributes:
        opener: before the name of another argument.
        end: of the call.
        is_next: whether an argument of this name may follow.
        behind_end: text after the end of a call, if not the end of all text.
        ends_lines: the line break before the end of a value is not part of it.
    """

    opener: str
    end: str
    is_next: Callable[[str], bool]
    behind_end: tuple[str, ...]
    ends_lines: bool = True

    def is_here(self, source: Source, mark: str) -> Steps[bool]:
        """Whether the mark just skipped, one of the two, ended the value."""
        if mark == self.end:
            yield from source.space()
            return source.at_end or (yield from source.peek(*self.behind_end)) is not None
        while True:
            name = _ARGUMENT_NAME.match(source.text, source.pos)
            if name is not None and (name.end() < len(source.text) or source.ended or len(name.group()) == MAX_NAME):
                return self.is_next(name[1])
            yield None


MAX_NAME = 256
"""Maximum characters between the opener of an argument and the end of its name."""

_ARGUMENT_NAME = re.compile(rf"""(?=["']?([^<>"']{{0,{MAX_NAME}}}))[^<>]{{0,{MAX_NAME}}}""")


def load_json(text: str) -> Any:
    """Parse JSON text; strings may contain raw control characters.

    Raises:
        Malformed: it is not JSON, or contains a number that JSON cannot represent.
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
