"""Grammars that make a model's tool calls fit their schemas, in the Lark dialect of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...runtime.structured.json_schema import unsound_parts
from .arguments import allowed, property_schema
from .bare_text import bare_text, left_out_of_root
from .tools import Tool

Prepare: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Converts a JSON schema to the one to compile: defaults, bounds, leniency."""


@dataclass(frozen=True)
class CallGrammar:
    """The syntax of calls, as a family's chat templates write it.

    Attributes:
        body: the expression between ``opener`` and ``closer``.
        opener: before a call.
        closer: after a call.
        section: before the first call.
        section_end: after the last.
        between: between two calls.
    """

    body: Callable[[Lark, Tool], str]
    opener: str
    closer: str = ""
    section: str = ""
    section_end: str = ""
    between: str = ""


class Lark:
    """The rules of a grammar under construction.

    Args:
        added_tokens: id of each added token by its text, which the grammar writes as that token.
        prepare: see ``Prepare``.
    """

    def __init__(self, added_tokens: Mapping[str, int], prepare: Prepare | None = None) -> None:
        self._ids = added_tokens
        ordered = sorted((token for token in added_tokens if token), key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else "((?!))")
        self._prepare = prepare or dict
        self._rules: list[str] = []

    def rule(self, body: str, attributes: str = "", name: str = "r") -> str:
        """Name of a new rule, or of a terminal if it begins with a capital."""
        name = f"{name}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def value(self, text: str, before: str = "", behind: str = "") -> str:
        """A client's text between two texts of the family, in ordinary tokens even if it spells an added one."""
        parts = [self.literal(before) if before else "", _quoted(text), self.literal(behind) if behind else ""]
        return " ".join(filter(None, parts))

    def literal(self, text: str) -> str:
        """Exactly this text of the family; added tokens in it are written as tokens."""
        parts = self._added.split(text)
        return " ".join(f"<[{self._ids[p]}]>" if i % 2 else _quoted(p) for i, p in enumerate(parts) if p) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that fits a schema."""
        return f"%json {json.dumps(self._prepare(schema))}"

    def begun(self, text: str, mark: str) -> str:
        """Any text, then this one, whose mark forces the rest: as a parser reads it.

        White space before the mark is part of the text.
        """
        rest = text[text.index(mark) + len(mark) :]
        return f"{self.text_until(mark)} {self.literal(rest)}" if rest else self.text_until(mark)

    def text_until(self, mark: str) -> str:
        """Any text, and the mark that ends it."""
        plain, *tokens = self._added.split(mark)
        if not tokens:
            return self.rule(f"/(?s:.*)/ {_quoted(mark)}", "[lazy]")
        # Added tokens are not part of any text, so text ends where one comes.
        text = self.rule(f"/(?s:.*)/ {_quoted(plain)}", name="ENDS_IN") if plain else "ANY_TEXT"
        return f"{text} {self.literal(mark[len(plain) :])}"

    def start(self, body: str) -> str:
        """The complete grammar, starting with this expression."""
        return "\n".join([f"start: {body}", "ANY_TEXT: /(?s:.*)/", *self._rules]) + "\n"


def calls_grammar(
    calls: CallGrammar,
    mark: str,
    tools: Sequence[Tool],
    added_tokens: Mapping[str, int],
    *,
    required: bool,
    parallel: bool = True,
    prepare: Prepare | None = None,
) -> str | None:
    """A grammar of calls only, if ``required``, else of text with calls in it.

    Args:
        calls: syntax of the calls.
        mark: the beginning of the first call, which identifies calls; "" for none.
        tools: the callable tools.
        added_tokens: as for ``Lark``.
        required: allow calls only.
        parallel: allow several calls.
        prepare: see ``Prepare``.

    Returns:
        The Lark text; None if text cannot be distinguished from the beginning of a call.
    """
    if not required and not mark:
        return None
    lark = Lark(added_tokens, prepare)
    bodies = " | ".join(lark.rule(calls.body(lark, tool)) for tool in tools)
    body = lark.rule(bodies)
    opener, closer = lark.literal(calls.opener), lark.literal(calls.closer) if calls.closer else ""
    call = lark.rule(f"{opener} {body} {closer}" if calls.opener else f"{body} {closer}")
    between = lark.literal(calls.between) if calls.between else ""
    more = f"({between} {call})*" if parallel else ""
    end = lark.literal(calls.section_end) if calls.section_end else ""
    if required:
        section = lark.literal(calls.section) if calls.section else ""
        return lark.start(f"{section} {call} {more} {end}")
    first = lark.begun(calls.section or calls.opener, mark)
    region = lark.rule(f"{first} {call} {more} {end}" if calls.section else f"{first} {body} {closer}")
    return lark.start(f"({region}){'*' if parallel else '?'} ANY_TEXT")


def json_body(
    before: str = '{"name": ', between: str = ', "arguments": ', after: str = "}"
) -> Callable[[Lark, Tool], str]:
    """A call as JSON, the name in quotes: ``{"name": "f", "arguments": {...}}``."""

    def body(lark: Lark, tool: Tool) -> str:
        name = lark.value(json.dumps(tool.name), before, between)
        return " ".join([name, lark.json(tool.parameters), *([lark.literal(after)] if after else [])])

    return body


def named_body(between: str, before: str = "", after: str = "", indexed: bool = False) -> Callable[[Lark, Tool], str]:
    """A call as its bare name, with a colon and a number if ``indexed``, and JSON arguments."""

    def body(lark: Lark, tool: Tool) -> str:
        name = [lark.value(tool.name, before, ":"), "/[0-9]{1,3}/"] if indexed else [lark.value(tool.name, before)]
        end = [lark.literal(after)] if after else []
        return " ".join([*name, lark.literal(between), lark.json(tool.parameters), *end])

    return body


@dataclass(frozen=True)
class TaggedBody:
    """A call whose arguments are tags with bare values, in schema order; optional ones may be left out.

    Text is bare, everything else JSON. For text, only ``enum`` and ``const`` are enforced; see ``left_out``.

    Attributes:
        name: text around the function's name, with ``{}`` for it.
        key: text before a value, with ``{}`` for the argument's name.
        closer: text after a value.
        text_key: as ``key`` for text, if it differs.
    """

    name: str
    key: str
    closer: str
    text_key: str = ""

    def __call__(self, lark: Lark, tool: Tool) -> str:
        required = tool.parameters.get("required", [])
        parts = [_filled(lark, self.name, tool.name)]
        properties = tool.parameters.get("properties", {})
        undeclared = [key for key in required if key not in properties]
        for key in (*properties, *undeclared):
            part = lark.rule(self._argument(lark, tool.parameters, key))
            parts.append(part if key in required else f"{part}?")
        return " ".join(parts)

    def left_out(self, tool: Tool) -> list[str]:
        """Parts of a tool's schema that are not enforced."""
        root = tool.parameters
        found = left_out_of_root(root)
        for key in dict.fromkeys((*root.get("properties", {}), *root.get("required", []))):
            schema = property_schema(root, key)
            is_text = _is_text(schema, root)
            words = bare_text(schema, root).left_out if is_text else unsound_parts(_by_itself(schema, root))
            found += [f"{word} of {key!r}" for word in words]
        return found

    def _argument(self, lark: Lark, root: Mapping[str, Any], key: str) -> str:
        schema = property_schema(root, key)
        opener, text_opener = (_filled(lark, tag, key) for tag in (self.key, self.text_key or self.key))
        if not _is_text(schema, root):
            return f"{opener} {lark.json(_by_itself(schema, root))} {lark.literal(self.closer)}"
        values = bare_text(schema, root).constants
        if values is None:
            return f"{text_opener} {lark.begun(self.closer, self.closer.strip())}"
        written = [(text_opener, v) if isinstance(v, str) else (opener, json.dumps(v)) for v in values]
        return " | ".join(f"{tag} {lark.value(text, behind=self.closer)}" for tag, text in dict.fromkeys(written))


def _filled(lark: Lark, tag: str, text: str) -> str:
    """A tag with a client's text in place of its ``{}``."""
    before, _, behind = tag.partition("{}")
    return lark.value(text, before, behind)


def left_out(calls: CallGrammar, tool: Tool) -> list[str]:
    """Parts of a tool's schema that the grammar accepts but does not enforce."""
    body = calls.body
    return body.left_out(tool) if isinstance(body, TaggedBody) else unsound_parts(tool.parameters)


def _is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    types, _ = allowed(schema, root)
    return not types or "string" in types


def _by_itself(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a property with the definitions that it may refer to."""
    return {**{word: root[word] for word in ("$defs", "definitions") if word in root}, **schema}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
