"""Prepares JSON schemas for llguidance, and finds the parts that it would not enforce."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from .covered_patterns import CoveredPatterns

_ANNOTATIONS = frozenset(
    "$schema $id $comment $defs definitions title description default examples deprecated readOnly writeOnly".split()
)
"""Keywords that constrain nothing."""

_TEXT_ABOUT_IT = frozenset("$comment title description default examples pattern patternProperties".split())
"""Keywords below which any character may stand."""

_ESCAPES = 'nrbtf\\"'
r"""Letters behind a backslash: each character has one spelling, so ``"\u0061"`` is no second key ``"a"``."""
_NEEDS_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

_LARGEST_WHOLE = 2**53
"""llguidance keeps numbers as floats."""

MAX_MULTIPLE = 100_000
"""Of all ``multipleOf`` of a schema together: their least common multiple, as integers. It is the number of
states that a digit can lead to; 1,000,003 takes seven seconds and 300 MB."""


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

MAX_REFERRING = 1_000
"""Objects of a schema that has references. llguidance follows a chain of them on the stack of its thread, which ends
the process after some 2,400."""

MAX_PROPERTIES = 2_000
"""Of all objects of a schema together. The time to compile grows with their square: 0.4 s and 7 MB for so many."""

MAX_PATTERNS = 100
"""Of one object. llguidance compares each with all others: 0.1 s for so many, a second for 200."""


def json_options(whitespace: str, *, lenient: bool) -> dict[str, Any]:
    """llguidance's ``JsonCompileOptions``."""
    spaced = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    free = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True}
    strings = {"json_allowed_escapes": _ESCAPES + "u" if lenient else _ESCAPES}
    return {**(free if whitespace == "any" else spaced), **strings, "lenient": lenient, "coerce_one_of": lenient}


def embedded_schema(name: str, schema: Any, *, lenient: bool) -> dict[str, Any]:
    """A schema as it stands behind ``%json`` in a grammar of ours, written without needless whitespace: where any is
    allowed, weak models write it until they are stopped.

    Args:
        name: of the field, for the message.
        schema: plain JSON, an object or a bool.
        lenient: leave out what cannot be enforced.

    Raises:
        ValueError: as ``checked_schema``.
    """
    return {**checked_schema(name, schema), "x-guidance": json_options("compact", lenient=lenient)}


def checked_schema(name: str, schema: Any) -> dict[str, Any]:
    """The schema as llguidance holds to it, or ``{"type": "object"}`` for one that constrains nothing.

    A number of any length would be an answer to such a one, and that is what weak models write. Pattern properties
    that only match declared properties are written into these.

    Args:
        name: of the field, for the message.
        schema: plain JSON, an object or a bool.

    Raises:
        ValueError: it allows nothing, takes too much to compile, or holds llguidance's own options.
    """
    if schema is False:
        raise ValueError(f"{name}=False allows no text; relax it")
    if schema is True or schema.keys() <= _ANNOTATIONS:
        return {"type": "object"}
    if "x-guidance" in schema:
        raise ValueError(f"{name} contains x-guidance, which is not supported; use the options strict and whitespace")
    if any(keyword in _REFERENCES for keyword, _, _ in _keywords(schema)) and _objects(schema) > MAX_REFERRING:
        raise ValueError(f"{name} has references and more than {MAX_REFERRING} objects; use fewer")
    multiple, properties = Fraction(1), 0
    for keyword, value, _ in _keywords(schema):
        if keyword in ("properties", "patternProperties") and isinstance(value, dict):
            properties += len(value)
            if properties > MAX_PROPERTIES:
                raise ValueError(f"{name} has more than {MAX_PROPERTIES} properties; use fewer")
            if keyword == "patternProperties" and len(value) > MAX_PATTERNS:
                raise ValueError(f"{name} has more than {MAX_PATTERNS} patternProperties in one object; use fewer")
        if keyword == "multipleOf" and isinstance(value, int | float) and value > 0:
            multiple = _least_common_multiple(multiple, Fraction(str(value)))
            if multiple.numerator > MAX_MULTIPLE:
                why = f"the least common multiple is above {MAX_MULTIPLE}"
                raise ValueError(f"{name} has multipleOf={value}: {why}; use rounder ones")
    try:
        result: dict[str, Any] = CoveredPatterns(json_options("compact", lenient=False)).written_out(schema)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply; flatten it") from None
    return result


def unsound_parts(schema: Any) -> list[str]:
    """Name the parts of a schema that an output may break although llguidance takes them; a line for each."""
    found: dict[str, None] = {}
    for keyword, value, around in _keywords(schema):
        if keyword == "minProperties" and isinstance(value, int | float):
            required = around.get("required")
            named = len({str(key) for key in required}) if isinstance(required, list) else 0
            if value > max(named, 1):
                found[
                    f"minProperties={value} is more than what is required: a key that comes twice would count twice"
                ] = None
        if keyword in _TEXT_ABOUT_IT:
            continue
        entries = (keyword, *value) if isinstance(value, dict | list) else (keyword, value)
        if any(isinstance(entry, int) and abs(entry) > _LARGEST_WHOLE for entry in entries):
            found[f"{keyword!r} holds an integer beyond 2**53, which is rounded"] = None
        if any(isinstance(entry, str) and _NEEDS_ESCAPE.search(entry) for entry in entries):
            found[f"{keyword!r} holds a control character that JSON writes as a number"] = None
    return list(found)


def _objects(schema: Any) -> int:
    """Dicts and lists in a schema, itself included."""
    return 1 + sum(isinstance(value, dict | list) for _, value, _ in _keywords(schema))


def _keywords(schema: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every key of every dict in a schema, with its value and that dict; a ``$ref`` can lead anywhere."""
    pending = [schema]
    while pending:
        entry = pending.pop()
        if isinstance(entry, dict):
            for key, value in entry.items():
                yield key, value, entry
                pending.append(value)
        elif isinstance(entry, list):
            pending.extend(entry)


def _least_common_multiple(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator))
