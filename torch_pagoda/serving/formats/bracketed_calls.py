"""Readers of calls in notations other than JSON: LFM2's Python, Gemma's brackets, MiniMax M3's elements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .arguments import allowed, alternatives, declared_types, property_schema, typed_value
from .json_calls import calls_of
from .python_values import PythonText
from .source import MAX_DEPTH, Malformed, ParsedCall, Source, Steps, load_json
from .tools import Tool


def read_lfm2(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """``<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`` in Python, or an array of JSON calls."""
    yield from source.expect("<|tool_call_start|>")
    yield from source.space()
    text = yield from source.python()
    inside = text[1:-1].strip()
    yield calls_of(load_json(text)) if inside.startswith("{") else _python_calls(inside)
    yield from source.stray_closers("<|tool_call_end|>")
    yield from source.accept("<|tool_call_end|>")


def _python_calls(text: str) -> list[ParsedCall]:
    """Calls with literal arguments, separated by commas."""
    source = PythonText(text)
    found = []
    while not source.at_end:
        name = source.name()
        arguments: dict[str, Any] = {}
        source.expect("(")
        while not source.accept(")"):
            key = source.name()
            source.expect("=")
            arguments[key] = source.value()
            if not source.accept(","):
                source.expect(")")
                break
        found.append(ParsedCall(name, arguments))
        if not source.accept(","):
            break
    if not source.at_end:
        raise source.malformed("call")
    return found


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
        root: JSON schema of the arguments; gives the types of bare values.
    """

    def __init__(self, tokens: list[tuple[str, bool]], root: Mapping[str, Any]) -> None:
        self._tokens = tokens
        self._root = root
        self._pos = 0

    def object(self, schema: Any) -> dict[str, Any]:
        """The object that is all of the tokens."""
        value = self._value(schema, 0)
        if self._pos < len(self._tokens) or not isinstance(value, dict):
            raise Malformed("the arguments are not an object")
        return value

    def _value(self, schema: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Malformed(f"brackets are nested deeper than {MAX_DEPTH} levels")
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
                    raise Malformed(f"elements are nested deeper than {MAX_DEPTH} levels")
            elif tag[1:] != (element := open_elements.pop()).name:
                raise Malformed(f"</{element.name}> is missing")
        root = next((tool.parameters for tool in tools if tool.name == name), {})
        yield [ParsedCall(name, _object_of(element, root, root))]


def _object_of(element: _Element, schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """An object's entries; several of one name form an array."""
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
    """The part of a schema that describes an object or an array; empty if none does."""
    word = "properties" if kind == "object" else "items"
    parts = (part for part in alternatives(schema, root) if word in part or kind in declared_types(part))
    return next(parts, {})
