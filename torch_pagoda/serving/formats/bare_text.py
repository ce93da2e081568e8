"""Arguments that calls hold as bare text: the texts that fit their JSON schema, and the keywords not enforced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import constants_of, own_types, resolve, type_of

_CONSTRAINING = frozenset(
    "anyOf oneOf allOf not if then else $ref $dynamicRef $recursiveRef dependencies dependentRequired "
    "dependentSchemas properties patternProperties additionalProperties unevaluatedProperties propertyNames required "
    "minProperties maxProperties items prefixItems additionalItems unevaluatedItems contains minContains maxContains "
    "minItems maxItems uniqueItems pattern minLength maxLength format "
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf enum const".split()
)
"""Keywords, except ``type``, that can make a value invalid."""

_OF_ARGUMENTS = frozenset({"properties", "required", "additionalProperties"})
"""Keywords that calls enforce on the object: each property at most once, and all required ones."""

_MAX_REFERENCES = 16


@dataclass(frozen=True)
class BareText:
    """The texts that an argument may be.

    Attributes:
        constants: its values, text bare and everything else as JSON; None: any text.
        left_out: keywords of its schema that are not enforced.
    """

    constants: tuple[Any, ...] | None = None
    left_out: tuple[str, ...] = ()


def bare_text(schema: Any, root: Mapping[str, Any]) -> BareText:
    """The texts of an argument that may be text; ``root`` resolves ``$ref``."""
    schema = _referred(schema, root)
    alternatives = schema.get("anyOf") if isinstance(schema, Mapping) else None
    if isinstance(alternatives, list) and alternatives and "type" not in schema and _words(schema) == ["anyOf"]:
        return _any_of([_referred(part, root) for part in alternatives])
    return _one(schema)


def left_out_of_root(root: Mapping[str, Any]) -> list[str]:
    """Keywords of the object schema that are not enforced when calls list one argument after the other."""
    return [word for word in _words(root) if word not in _OF_ARGUMENTS]


def _one(schema: Any) -> BareText:
    """As ``bare_text``, for a schema by itself."""
    if not isinstance(schema, Mapping):
        return BareText(left_out=("false",) if schema is False else ())
    words = _words(schema)
    if not words and own_types(schema) == {"null"}:
        return BareText((None,))
    values = constants_of(schema)
    if not values or (isinstance(schema.get("enum"), list) and "const" in schema):
        return BareText(left_out=tuple(words))
    left_out = [word for word in words if word not in ("enum", "const")]
    if not all(_is_one_of(value, own_types(schema)) for value in values):
        left_out.append("type")
    return BareText(tuple(values), tuple(left_out))


def _any_of(schemas: Sequence[Any]) -> BareText:
    texts = [_one(schema) for schema in schemas]
    left_out = list(dict.fromkeys(word for text in texts for word in text.left_out))
    values = [value for text in texts for value in text.constants or ()]
    free = [schema for schema, text in zip(schemas, texts, strict=True) if text.constants is None]
    if not free:
        return BareText(tuple(values), tuple(left_out))
    # Text that looks like a value of another type is read as one: then any value of that type has to fit.
    types = [own_types(schema) if isinstance(schema, Mapping) else set() for schema in free]
    known = set().union(*types)
    if all(types) and not ("string" in known and all(value is None or _is_one_of(value, known) for value in values)):
        left_out.append("anyOf")
    return BareText(None, tuple(left_out))


def _is_one_of(value: Any, types: set[str]) -> bool:
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def _words(schema: Mapping[str, Any]) -> list[str]:
    return [word for word in schema if word in _CONSTRAINING]


def _referred(schema: Any, root: Mapping[str, Any]) -> Any:
    """The target of a schema that is only a reference; else the schema itself."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "type" in schema or _words(schema) != ["$ref"]:
            break
        found = resolve(schema["$ref"], root) if isinstance(schema["$ref"], str) else None
        if not isinstance(found, Mapping | bool):
            break
        schema = found
    return schema
