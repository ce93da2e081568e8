"""Grammars in llguidance's language, written from a request's constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from .asked import AskedOutput
from .json_numbers import JsonNumbers, NumberLengths
from .json_schema import checked_schema, json_options, unsound_parts
from .lark_depth import lark_depth
from .tag_numbers import Tag, TagNumbers
from .vocabulary import load_llguidance

MAX_GBNF_CHARACTERS = 64_000
MAX_GBNF_LINES = 1_000
"""GBNF is read in Python, in a time that grows with the square of its lines: 1,000 rules take 0.6 seconds."""

MAX_CHAIN = 1_000
"""Rules of a grammar that lead to each other, with the brackets within them. llguidance follows such a chain on the
stack of its thread, which ends the process after some 2,600."""

_ANY_TOKENS = '%llguidance {"no_forcing": true}'
"""The model chooses the tokens of text that can go on in one way only. Otherwise llguidance has the tokenizer
encode it, which finds special and added tokens in it, and normalizes it to text that the grammar does not allow.
"""

_EMBEDDED_SCHEMA = re.compile(r"%json\s*")
_ONLY_SCHEMA = re.compile(r"\s*(?:%llguidance\s*\{\s*\}\s*)?start\s*:\s*%json\s*(?=\{)")


class GrammarSource:
    """A grammar on its way to llguidance.

    Args:
        name: of the field, for messages.
        asked: the requested output.

    Attributes:
        problems: what of its schemas would not be held to although llguidance takes it.
        numbers: makes what follows the numbers of its text, where it is known what of it is JSON: all of it, or what
            stands in tags. None elsewhere: in a grammar, whose own rules may want any digits.

    Raises:
        ValueError: it is none of its kind, or beyond a limit.
    """

    def __init__(self, name: str, asked: AskedOutput) -> None:
        self._asked = asked
        llguidance = load_llguidance()
        self._schemas: list[dict[str, Any]] = []
        self._text = ""
        self.numbers: Callable[[], NumberLengths] | None = JsonNumbers if asked.kind == "json" else None
        value = asked.value
        if asked.kind == "json":
            self._schemas = [checked_schema(name, value)]
        elif asked.kind == "regex":
            written = json.loads(llguidance.LLMatcher.grammar_from_regex(value))
            self._text = written["grammars"][0]["lark_grammar"]
        elif asked.kind == "choice":
            self._text = "start: " + " | ".join(_literal(choice) for choice in value)
        elif asked.kind == "grammar":
            self._text = _lark(name, value)
            for i, schema in enumerate(_embedded_schemas(value)):
                options = schema.pop("x-guidance", None)
                here = f"{name} %json {i + 1}"
                if checked_schema(here, schema) not in (schema, {"type": "object"}):
                    raise ValueError(
                        f"{here} has patternProperties that match declared properties only; move their schemas into "
                        "properties"
                    )
                if not (isinstance(options, dict) and options.get("lenient") is True):
                    self._schemas.append(schema)
            if _is_one_schema(value):
                self.numbers = JsonNumbers
        else:
            tags = value["structures"]
            self.numbers = partial(TagNumbers, [_tag(entry) for entry in tags])
            self._schemas = [
                checked_schema(f"{name}.structures[{i}].schema", t["schema"]) for i, t in enumerate(tags)
            ]
        self.problems = list(dict.fromkeys(part for schema in self._schemas for part in unsound_parts(schema)))

    def written(self, *, lenient: bool) -> str:
        """The grammar in llguidance's Lark.

        Args:
            lenient: leave out what of a schema cannot be enforced.
        """
        options = json_options(self._asked.whitespace, lenient=lenient)
        text = self._text
        if self._asked.kind == "json":
            text = f"start: {_json(self._schemas[0], options)}"
        elif self._asked.kind == "structural_tag":
            text = _tags(self._asked.value["structures"], self._schemas, options)
        return f"{text}\n{_ANY_TOKENS}\n"


def _lark(name: str, text: str) -> str:
    """Lark of what may be GBNF.

    Raises:
        ValueError: it is neither, or beyond a limit.
    """
    if "::=" in text and (len(text) > MAX_GBNF_CHARACTERS or text.count("\n") >= MAX_GBNF_LINES):
        raise ValueError(
            f"{name} is GBNF of more than {MAX_GBNF_LINES} lines or {MAX_GBNF_CHARACTERS} characters; shorten it, or "
            "write it as Lark"
        )
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = str(any_to_lark(text))
    except Exception as error:  # whatever a text that is no grammar does to it
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{name} is neither Lark nor GBNF: {reason}; change it") from None
    if lark_depth(lark) > MAX_CHAIN:
        raise ValueError(f"{name} nests more than {MAX_CHAIN} rules and brackets; use fewer")
    return lark


def _embedded_schemas(text: str) -> list[Any]:
    """The schemas that stand in a Lark grammar; what is not JSON is left to llguidance."""
    schemas: list[Any] = []
    for match in _EMBEDDED_SCHEMA.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict):
            schemas.append(schema)
    return schemas


def _is_one_schema(text: str) -> bool:
    """True for a Lark grammar that is nothing but a schema."""
    begin = _ONLY_SCHEMA.match(text)
    if begin is None:
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return False
    return not text[end:].strip()


def _tag(entry: dict[str, Any]) -> Tag:
    trigger = entry["trigger"]
    return Tag(trigger.encode(), entry["begin"][len(trigger) :].encode(), entry["end"].encode())


def _tags(structures: list[dict[str, Any]], schemas: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Lark of any text in which each trigger opens its tag."""
    lines = ["start: (" + " | ".join(f"tag_{i}" for i in range(len(structures))) + ")* rest"]
    lines += ["rest: TEXT", r"TEXT: /(.|\n)*/"]
    for i, (entry, schema) in enumerate(zip(structures, schemas, strict=True)):
        trigger = entry["trigger"]
        rest, end = (_literal(text) if text else "" for text in (entry["begin"][len(trigger) :], entry["end"]))
        lines += [
            f"open_{i}[lazy]: TEXT {_literal(trigger)}",
            f"tag_{i}: open_{i} {rest} {_json(schema, options)} {end}",
        ]
    return "\n".join(lines)


def _json(schema: dict[str, Any], options: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
