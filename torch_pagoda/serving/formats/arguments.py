"""Values of arguments that a model wrote as bare text, typed by the tool's JSON schema.

Some formats write ``<parameter=zip>01234</parameter>``: only the schema says whether that is text or a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .python_values import python_value
from .source import MAX_DEPTH, Malformed, load_json
from .tools import Tool

_INTEGER = re.compile(r"-?\d{1,4000}", re.ASCII)
_CANONICAL_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,3999})", re.ASCII)
_MAX_STEPS = 256
"""Maximum subschemas read for one argument; ``$ref`` may be circular."""
_MAX_REFERENCE_STEPS = 16

_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def argument(name: str, key: str, text: str, tools: Sequence[Tool]) -> Any:
    """The value of an argument.

    Text stays text if the schema allows nothing else, or if nothing else can be read from it. If it allows text and
    other types, text that is exactly such a value is that value: ``null``, ``12`` and ``{"a": 1}``, but ``012`` is
    text. If it allows no text, Python's literals are read, too, and ``null`` is null even if the schema does not name
    it. Without a type in the schema, JSON is read as JSON and anything else is text.

    Args:
        name: of the function.
        key: of the argument.
        text: as the model wrote it.
        tools: of the request.
    """
    root = next((tool.parameters for tool in tools if tool.name == name), {})
    return typed_value(text, property_schema(root, key), root)


def property_schema(root: Mapping[str, Any], key: str) -> Any:
    """The subschema of an object's property; True where any value goes."""
    properties = root.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return root.get("additionalProperties", True)


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Convert text to one of the types that a schema allows; ``root`` resolves ``$ref``."""
    types, constants = allowed(schema, root)
    if not types:
        return _any_value(text)
    if text in constants or types == {"string"}:
        return text
    bare = text.strip()
    strictly = "string" in types
    if (bare == "null" and "null" in types) if strictly else bare.lower() in ("null", "none"):
        return None
    if "boolean" in types and (bare if strictly else bare.lower()) in ("true", "false"):
        return bare.lower() == "true"
    if types & {"integer", "number"}:
        number = _number(bare, types, strictly)
        if number is not None:
            return number
    if types & {"object", "array"} and bare[:1] in ("{", "[", "("):
        value = _any_value(bare) if strictly else _literal(bare)
        if _TYPE_OF.get(type(value)) in types:
            return value
    return text


def allowed(schema: Any, root: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Types that a schema allows, empty if it does not say; and the strings among its constants."""
    types: set[str] = set()
    constants: set[str] = set()
    for part in alternatives(schema, root):
        types |= own_types(part)
        constants.update(value for value in constants_of(part) if isinstance(value, str))
    return types, constants


def own_types(schema: Mapping[str, Any]) -> set[str]:
    """Types that a schema allows by itself, empty if it does not say."""
    types = set(declared_types(schema))
    if schema.get("nullable") is True:
        types.add("null")
    if schema.get("type") is None:
        types.update(type_of(value) for value in constants_of(schema))
        types.update(kind for word, kind in (("properties", "object"), ("items", "array")) if word in schema)
    return types


def type_of(value: Any) -> str:
    """JSON Schema's name for a value's type."""
    return _TYPE_OF.get(type(value), "null")


def declared_types(schema: Mapping[str, Any]) -> list[str]:
    """The names in ``type``."""
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    return [entry for entry in listed if isinstance(entry, str)]


def constants_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values of ``enum`` and ``const``."""
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    return [*values, *([schema["const"]] if "const" in schema else ())]


def alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and the schemas it refers to: in ``anyOf``, ``oneOf`` and ``allOf`` and by ``$ref`` into
    ``root``."""
    waiting = [schema]
    for _ in range(_MAX_STEPS):
        if not waiting:
            return
        part = waiting.pop(0)
        if not isinstance(part, Mapping):
            continue
        yield part
        for word in ("anyOf", "oneOf", "allOf"):
            choices = part.get(word)
            waiting += choices if isinstance(choices, list) else []
        if isinstance(part.get("$ref"), str):
            waiting.append(resolve(part["$ref"], root))


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of ``$ref``; None if there is none."""
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/")[:_MAX_REFERENCE_STEPS]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _number(text: str, types: set[str], strictly: bool) -> int | float | None:
    if (_CANONICAL_INTEGER if strictly else _INTEGER).fullmatch(text):
        return int(text)
    if not re.match(r"[+-]?\.?[0-9]", text):
        return None
    value = _any_value(text) if strictly else _literal(text)
    if type(value) is float and "number" in types:
        return value
    if type(value) in (int, float) and not strictly and value == int(value):
        return int(value)
    return None


def _literal(text: str) -> Any:
    """JSON, or a literal of Python; else the text itself."""
    value = _any_value(text)
    if isinstance(value, str):
        try:
            return python_value(text)
        except Malformed:
            return text
    return value


def _any_value(text: str) -> Any:
    """JSON, or the text itself if it is not JSON or is a JSON string."""
    try:
        value = load_json(text.strip())
    except Malformed:
        return text
    return text if isinstance(value, str) or not _is_flat_enough(value) else value


def _is_flat_enough(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parents = [entry for entry in level if isinstance(entry, dict | list)]
        if not parents:
            return True
        level = [child for parent in parents for child in (parent.values() if isinstance(parent, dict) else parent)]
    return False
