"""Readers of calls in notations of their own: LFM2's Python, Gemma's brackets, MiniMax M3's elements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .arguments import allowed, alternatives, declared_types, property_schema, typed_value
from .json_calls import calls_of
from .source import MAX_DEPTH, Malformed, ParsedCall, Source, Steps, load_json
from .tools import Tool

_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.:/-]*", re.ASCII)
_PYTHON_STRING = re.compile(r"""'((?:[^\\']|\\.)*)'|"((?:[^\\"]|\\.)*)\"""", re.DOTALL)
_PYTHON_NUMBER = re.compile(r"[+-]?(?:\d{1,4000}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_PYTHON_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}


def read_lfm2(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """``<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`` in Python, or an array of JSON calls."""
    yield from source.expect("<|tool_call_start|>")
    yield from source.space()
    text = yield from source.python()
    inside = text[1:-1].strip()
    yield calls_of(load_json(text)) if inside.startswith("{") else _PythonCalls(inside).calls()
    yield from source.space()
    yield from source.accept("<|tool_call_end|>")


class _PythonCalls:
    """Calls with literal arguments. Brackets within each other have been counted before: it recurses into them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0

    def calls(self) -> list[ParsedCall]:
        found = []
        while self._pos < len(self._text):
            name = self._name()
            arguments: dict[str, Any] = {}
            self._expect("(")
            while not self._accept(")"):
                key = self._name()
                self._expect("=")
                arguments[key] = self._value()
                if not self._accept(","):
                    self._expect(")")
                    break
            found.append(ParsedCall(name, arguments))
            if not self._accept(","):
                break
        if self._pos < len(self._text):
            raise Malformed(f"no call at {self._text[self._pos : self._pos + 20]!r}")
        return found

    def _value(self) -> Any:
        if self._accept("["):
            return self._values("]")
        if self._accept("("):
            return self._values(")")
        if self._accept("{"):
            entries = {}
            while not self._accept("}"):
                key = self._value()
                self._expect(":")
                entries[key if isinstance(key, str) else str(key)] = self._value()
                if not self._accept(","):
                    self._expect("}")
                    break
            return entries
        if text := self._match(_PYTHON_STRING):
            return _ESCAPE.sub(_unescape, text[1:-1])
        if text := self._match(_PYTHON_NUMBER):
            digits = text.lstrip("+-")
            if digits.isdecimal():
                return int(text)
            return load_json(repr(float(text)))
        word = self._name()
        if word not in _PYTHON_WORDS:
            raise Malformed(f"{word[:20]!r} is no value")
        return _PYTHON_WORDS[word]

    def _values(self, closer: str) -> list[Any]:
        values = []
        while not self._accept(closer):
            values.append(self._value())
            if not self._accept(","):
                self._expect(closer)
                break
        return values

    def _name(self) -> str:
        name = self._match(_PYTHON_NAME)
        if not name:
            raise Malformed(f"no name at {self._text[self._pos : self._pos + 20]!r}")
        return name

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._pos)
        self._pos = found.end() if found else self._pos
        self._space()
        return found.group() if found else ""

    def _accept(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._pos):
            return False
        self._pos += len(mark)
        self._space()
        return True

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise Malformed(f"no {mark} at {self._text[self._pos : self._pos + 20]!r}")

    def _space(self) -> None:
        while self._text[self._pos : self._pos + 1].isspace():
            self._pos += 1


def _unescape(escape: re.Match[str]) -> str:
    for digits in escape.groups()[:3]:
        if digits is not None:
            return chr(int(digits, 16)) if int(digits, 16) <= 0x10FFFF else escape.group()
    return escape[4] if escape[4] in "\\'\"" else _ESCAPED.get(escape[4], escape.group())


def read_gemma(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """``<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>``; text stands between two ``<|"|>``."""
    yield from source.expect("<|tool_call>")
    yield from source.space()
    yield from source.expect("call:")
    name = (yield from source.until("{"))[0].strip()
    tokens = [("{", False)]
    quoted = False
    while True:
        text, mark = yield from source.until(*(['<|"|>'] if quoted else ['<|"|>', "<tool_call|>"]))
        tokens += [(text, True)] if quoted else [(part, False) for part in _GEMMA_MARK.split(text) if part.strip()]
        if mark == "<tool_call|>":
            break
        quoted = not quoted
    root = next((tool.parameters for tool in tools if tool.name == name), {})
    yield [ParsedCall(name, _GemmaArguments(tokens, root).object(root))]


_GEMMA_MARK = re.compile(r"([{}\[\],:])")


class _GemmaArguments:
    """An object of bare keys and values.

    Args:
        tokens: marks, and text between them; whether each was quoted.
        root: JSON schema of the arguments; says what bare values are.
    """

    def __init__(self, tokens: list[tuple[str, bool]], root: Mapping[str, Any]) -> None:
        self._tokens = tokens
        self._root = root
        self._pos = 0

    def object(self, schema: Any) -> dict[str, Any]:
        """The object that is all of the tokens."""
        value = self._value(schema, 0)
        if self._pos < len(self._tokens) or not isinstance(value, dict):
            raise Malformed("arguments that are no object")
        return value

    def _value(self, schema: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Malformed(f"more than {MAX_DEPTH} brackets within each other")
        if self._accept("{"):
            schema = container(schema, self._root, "object")
            entries = {}
            while not self._accept("}"):
                key, quoted = self._next()
                self._expect(":")
                key = key if quoted else key.strip()
                entries[key] = self._value(property_schema(schema, key), depth + 1)
                if not self._accept(","):
                    self._expect("}")
                    break
            return entries
        if self._accept("["):
            schema = container(schema, self._root, "array")
            values = []
            while not self._accept("]"):
                values.append(self._value(schema.get("items"), depth + 1))
                if not self._accept(","):
                    self._expect("]")
                    break
            return values
        text, quoted = self._next()
        if quoted:
            return text
        while self._pos < len(self._tokens) and self._tokens[self._pos] not in _GEMMA_ENDS:
            text += self._next()[0]
        return typed_value(text.strip(), schema, self._root)

    def _next(self) -> tuple[str, bool]:
        if self._pos >= len(self._tokens) or self._tokens[self._pos] in _GEMMA_ENDS:
            raise Malformed("a key or a value is missing")
        self._pos += 1
        return self._tokens[self._pos - 1]

    def _accept(self, mark: str) -> bool:
        if self._tokens[self._pos : self._pos + 1] != [(mark, False)]:
            return False
        self._pos += 1
        return True

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise Malformed(f"a {mark} is missing")


_GEMMA_ENDS = [(mark, False) for mark in ",}]"]

_MINIMAX = "]<]minimax[>["


@dataclass
class _Element:
    """``<name>text</name>``, or elements within it in place of text."""

    name: str
    text: str = ""
    children: list[_Element] = field(default_factory=list)


def read_minimax_m3(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """A section of ``<invoke name="NAME"><KEY>VALUE</KEY></invoke>``, a mark before each tag; values may nest."""
    yield from source.expect(f"{_MINIMAX}<tool_call>")
    while (yield from source.another(f"{_MINIMAX}<invoke name=", f"{_MINIMAX}</tool_call>")):
        name = (yield from source.until(">"))[0].strip("\"' ")
        open_elements = [_Element("invoke")]
        while open_elements:
            text, _ = yield from source.until(_MINIMAX)
            open_elements[-1].text += text
            yield from source.expect("<")
            tag, _ = yield from source.until(">")
            if not tag.startswith("/"):
                element = _Element(tag)
                open_elements[-1].children.append(element)
                open_elements.append(element)
                if len(open_elements) > MAX_DEPTH:
                    raise Malformed(f"more than {MAX_DEPTH} elements within each other")
            elif tag[1:] != (element := open_elements.pop()).name:
                raise Malformed(f"</{element.name}> is missing")
        root = next((tool.parameters for tool in tools if tool.name == name), {})
        yield [ParsedCall(name, _object_of(element, root, root))]


def _object_of(element: _Element, schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """An object's entries; several of one name are an array."""
    schema = container(schema, root, "object")
    grouped: dict[str, list[Any]] = {}
    for child in element.children:
        grouped.setdefault(child.name, []).append(_value_of(child, property_schema(schema, child.name), root))
    return {name: values[0] if len(values) == 1 else values for name, values in grouped.items()}


def _value_of(element: _Element, schema: Any, root: Mapping[str, Any]) -> Any:
    types, _ = allowed(schema, root)
    if not element.children:
        if not element.text.strip() and types & {"array", "object"} and "string" not in types:
            return [] if "array" in types else {}
        return typed_value(element.text, schema, root)
    if "array" in types or (not types and {child.name for child in element.children} == {"item"}):
        items = container(schema, root, "array").get("items")
        return [_value_of(child, items, root) for child in element.children]
    return _object_of(element, schema, root)


def container(schema: Any, root: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The part of a schema that describes an object or an array; an empty one where none does."""
    word = "properties" if kind == "object" else "items"
    parts = (part for part in alternatives(schema, root) if word in part or kind in declared_types(part))
    return next(parts, {})
