"""Validates ``structured_outputs`` as the caller wrote it, before anything is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..shown import shown

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Kinds of constraints; exactly one is required."""
OPTIONS = ("strict", "whitespace", "after")
"""Additional options."""

MAX_TEXT = 256_000
"""Characters of a schema, regex, grammar or of all choices together."""
MAX_DEPTH = 64
"""Maximum nesting of brackets."""
MAX_CHOICES = 10_000
MAX_TAGS = 128
"""Maximum entries of ``structures``."""
MAX_AFTER = 64
"""Maximum tokens, or characters, of the text before a grammar."""

After: TypeAlias = str | tuple[str, ...] | tuple[int, ...]
"""The text before a grammar; see ``AskedOutput``."""

_REMEDY = "use one of " + ", ".join(KINDS)
_OPTIONS = ", ".join(OPTIONS)


@dataclass(frozen=True, slots=True)
class AskedOutput:
    """A structured output that somebody asks for, well formed but not compiled.

    Attributes:
        kind: one of ``KINDS``; ``"json_object"`` is a ``"json"`` here.
        value: the schema, the regular expression, the choices, the grammar's text or the structural tag.
        strict: a schema that cannot be enforced as a whole is refused; else what cannot be enforced is left out.
        whitespace: ``"compact"``: JSON is written as ``{"a": 1, "b": [2, 3]}``; ``"any"``: with any whitespace.
        after: the grammar begins when these tokens, this text, or these texts one after the other have been
            generated, before which nothing can end the completion but a stop string or its length; None: with the
            first token.
    """

    kind: str
    value: Any
    strict: bool = True
    whitespace: Literal["compact", "any"] = "compact"
    after: After | None = None


def read_structured_outputs(value: object) -> AskedOutput:
    """Read ``SamplingParams.structured_outputs``.

    Args:
        value: a mapping with one of ``KINDS``, and ``OPTIONS`` where they are wanted.

            - ``"json"``: a JSON schema, as a dict, True or JSON text;
            - ``"json_object": True``: any JSON object;
            - ``"regex"``: of the whole text, in the syntax of Rust's ``regex``, without look-around;
            - ``"choice"``: a list of texts;
            - ``"grammar"``: Lark as llguidance writes it, or GBNF;
            - ``"structural_tag"``: ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``.

    Raises:
        ValueError: it is something else, or beyond a limit of this module; one line.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f'structured_outputs={shown(value)} is not a mapping; use one such as {{"regex": "[0-9]+"}}')
    for name in value:
        if name not in KINDS and name not in OPTIONS:
            raise ValueError(
                f"structured_outputs has {shown(name)}, which is unknown; {_REMEDY}, with the options {_OPTIONS}"
            )
    kinds = [kind for kind in KINDS if value.get(kind) is not None]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "nothing"
        raise ValueError(f"structured_outputs has {found}; {_REMEDY}")
    (kind,) = kinds
    read = {
        "json": _schema,
        "json_object": _json_object,
        "regex": _text,
        "grammar": _text,
        "choice": _choices,
        "structural_tag": _structural_tag,
    }[kind]
    strict = value.get("strict", True)
    if not isinstance(strict, bool):
        raise ValueError(f"structured_outputs.strict={shown(strict)} is not a bool; use True or False")
    whitespace = value.get("whitespace", "compact")
    if whitespace not in ("compact", "any"):
        raise ValueError(f'structured_outputs.whitespace={shown(whitespace)} is unknown; use "compact" or "any"')
    asked = read(f"structured_outputs.{kind}", value[kind])
    return AskedOutput(
        "json" if kind == "json_object" else kind, asked, strict, whitespace, _after(value.get("after"))
    )


def plain_json(name: str, value: object) -> Any:
    """A copy of a value that is made of dicts with text as keys, lists, text, finite numbers, bools and None.

    Raises:
        ValueError: it holds something else, is too deep or too large; one line.
    """
    pending: list[tuple[object, int]] = [(value, 1)]
    count = 0
    while pending:
        entry, depth = pending.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{name} is nested deeper than {MAX_DEPTH}; flatten it")
        if count > MAX_TEXT:
            raise ValueError(f"{name} has more than {MAX_TEXT} entries; shorten it")
        if isinstance(entry, Mapping):
            for key in entry:
                if not isinstance(key, str):
                    raise ValueError(f"{name} has the key {shown(key)}; use strings as keys")
            pending.extend((inner, depth + 1) for inner in entry.values())
        elif isinstance(entry, list | tuple):
            pending.extend((inner, depth + 1) for inner in entry)
        elif entry is not None and not isinstance(entry, str | bool | int | float):
            raise ValueError(f"{name} contains {shown(entry)}, which is not JSON; use dicts, lists, text and numbers")
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=dict)
        text.encode()
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} is not JSON ({_first_line(error)}); use finite numbers and whole characters"
        ) from None
    if len(text) > MAX_TEXT:
        raise ValueError(f"{name} has {len(text)} characters of JSON, above the limit of {MAX_TEXT}; shorten it")
    return json.loads(text)


def _schema(name: str, value: object) -> Any:
    if isinstance(value, str):
        _text(name, value)
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is not JSON ({_first_line(error)}); give a schema as a dict") from None
    if not isinstance(value, Mapping | bool):
        raise ValueError(f'{name}={shown(value)} is not a JSON schema; use a dict such as {{"type": "object"}}')
    return plain_json(name, value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json_object(name: str, value: object) -> Any:
    if value is not True:
        raise ValueError(f"{name}={shown(value)} is not True; use True, or omit it")
    return {"type": "object"}


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={shown(value)} is not text; use a non-empty string")
    if len(value) > MAX_TEXT:
        raise ValueError(f"{name} has {len(value)} characters, above the limit of {MAX_TEXT}; shorten it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} contains half a surrogate pair; use complete characters") from None
    if "\0" in value:
        raise ValueError(f"{name} contains a NUL character; escape it")
    return str(value)


def _choices(name: str, value: object) -> list[str]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence) or not value:
        raise ValueError(f'{name}={shown(value)} is not a list of texts; use one such as ["yes", "no"]')
    if len(value) > MAX_CHOICES:
        raise ValueError(f"{name} has {len(value)} entries, above the limit of {MAX_CHOICES}; give fewer")
    choices = list(dict.fromkeys(_text(f"{name}[{i}]", entry) for i, entry in enumerate(value)))
    if sum(map(len, choices)) > MAX_TEXT:
        raise ValueError(f"{name} has more than {MAX_TEXT} characters in all; give fewer or shorter ones")
    return choices


def _structural_tag(name: str, value: object) -> dict[str, Any]:
    if isinstance(value, str):
        value = _schema(name, value)
    if not isinstance(value, Mapping):
        raise ValueError(f'{name}={shown(value)} is not a mapping; use {{"structures": [...], "triggers": [...]}}')
    tag: dict[str, Any] = plain_json(name, value)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or len(structures) > MAX_TAGS:
        raise ValueError(
            f"{name}.structures is not a list of 1 to {MAX_TAGS} entries; give begin, schema and end each"
        )
    if not isinstance(triggers, list) or not triggers or len(triggers) > MAX_TAGS:
        raise ValueError(f"{name}.triggers is not a list of 1 to {MAX_TAGS} texts; give prefixes of the begin texts")
    triggers = [_text(f"{name}.triggers[{i}]", trigger) for i, trigger in enumerate(triggers)]
    read: list[dict[str, Any]] = []
    for i, entry in enumerate(structures):
        here = f"{name}.structures[{i}]"
        if not isinstance(entry, dict) or not {"begin", "end"} <= entry.keys():
            raise ValueError(f"{here} has no begin or no end; give both, and a schema")
        begin = _text(f"{here}.begin", entry["begin"])
        if not isinstance(entry["end"], str):
            raise ValueError(f"{here}.end={shown(entry['end'])} is not text; use a string")
        # Of triggers that begin with each other the shortest comes first in any text, and opens the tags of all.
        trigger = min((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default=None)
        if trigger is None:
            raise ValueError(f"{here}.begin={shown(begin)} starts with none of the triggers; add one")
        schema = entry.get("schema", True)
        read.append(
            {"trigger": trigger, "begin": begin, "schema": _schema(f"{here}.schema", schema), "end": entry["end"]}
        )
    used = {entry["trigger"] for entry in read}
    for i, entry in enumerate(read):
        # Another trigger that ends where this one does leaves both tags open.
        earlier = min(
            (other for other in used if 0 <= entry["trigger"].find(other) < len(entry["trigger"]) - len(other)),
            default=None,
        )
        if earlier is not None:
            raise ValueError(
                f"{name}.structures[{i}] can never be generated: its trigger {shown(entry['trigger'])} contains the "
                f"trigger {shown(earlier)}, which opens another tag first; use triggers that do not contain each "
                "other"
            )
    return {"structures": read}


def _after(value: object) -> After | None:
    name = "structured_outputs.after"
    if value is None:
        return None
    if isinstance(value, str):
        return _texts(name, [value])[0]
    entries = list(value) if isinstance(value, list | tuple) else []
    if entries and all(isinstance(entry, str) for entry in entries):
        return _texts(name, entries)
    if not 0 < len(entries) <= MAX_AFTER or any(
        isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in entries
    ):
        raise ValueError(f"{name}={shown(value)} is neither text nor a list of 1 to {MAX_AFTER} token ids or texts")
    return tuple(entries)


def _texts(name: str, texts: list[str]) -> tuple[str, ...]:
    length = sum(len(_text(name, text)) for text in texts)
    if length > MAX_AFTER:
        raise ValueError(f"{name} has {length} characters, above the limit of {MAX_AFTER}; shorten it")
    return tuple(texts)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
