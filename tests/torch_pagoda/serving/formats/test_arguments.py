"""Bare text as the value that the tool's schema makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.serving.formats.arguments import typed_value

DEFS: dict[str, Any] = {
    "$defs": {"id": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"type": "boolean"}},
}
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
BOOLEAN, OBJECT, ARRAY = {"type": "boolean"}, {"type": "object"}, {"type": "array"}
NULLABLE = {"anyOf": [STRING, {"type": "null"}]}
EITHER = {"oneOf": [STRING, INTEGER]}


@pytest.mark.parametrize(
    "schema, text, value",
    [
        *((STRING, text, text) for text in ("12", "null", "true", '{"a": 1}', '"q"', "", " x\n", "1e5")),
        (NULLABLE, "null", None),
        (NULLABLE, "None", "None"),
        (NULLABLE, "12", "12"),
        (NULLABLE, '"q"', '"q"'),
        (NULLABLE, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        (EITHER, "12", 12),
        (EITHER, "012", "012"),
        (EITHER, "1.5", "1.5"),
        (EITHER, "12a", "12a"),
        ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 2, None]}, "1", "1"),
        ({"enum": ["1", 2, None]}, "2", 2),
        ({"enum": ["1", 2, None]}, "null", None),
        ({"const": 4}, "4", 4),
        (INTEGER, " 12\n", 12),
        (INTEGER, "-012", -12),
        (INTEGER, "3.0", 3),
        (INTEGER, "3.5", "3.5"),
        (INTEGER, "1_000", "1_000"),
        (INTEGER, "9" * 5000, "9" * 5000),
        (INTEGER, "٣", "٣"),
        (NUMBER, "1.50", 1.5),
        (NUMBER, "2", 2),
        (NUMBER, "1e999", "1e999"),
        (NUMBER, "NaN", "NaN"),
        (BOOLEAN, "True", True),
        (BOOLEAN, "false", False),
        (BOOLEAN, "yes", "yes"),
        ({"anyOf": [BOOLEAN, STRING]}, "True", "True"),
        (OBJECT, ' {"a": [1, {"b": null}]} ', {"a": [1, {"b": None}]}),
        (OBJECT, "[1]", "[1]"),
        (OBJECT, "{'a': 1}", {"a": 1}),
        (OBJECT, "{'a': open()}", "{'a': open()}"),
        (ARRAY, "('a', None)", ["a", None]),
        (INTEGER, "null", None),
        ({"anyOf": [STRING, ARRAY]}, "['a']", "['a']"),
        (ARRAY, "[" * 100_000, "[" * 100_000),
        (ARRAY, "[" * 80 + "]" * 80, "[" * 80 + "]" * 80),
        ({"anyOf": [STRING, ARRAY]}, '["a"]', ["a"]),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/id"}, "7", 7),
        ({"$ref": "#/$defs/a~1b"}, "true", True),
        ({"$ref": "#/$defs/loop"}, "7", 7),
        ({"$ref": "#/$defs/none"}, "x", "x"),
        ({"$ref": "https://example.org/x"}, "7", 7),
        ({}, "7", 7),
        ({}, "true", True),
        ({}, "07", "07"),
        ({}, '"q"', '"q"'),
        (True, "[1]", [1]),
        ({"type": 3, "anyOf": 4, "enum": 5}, "x", "x"),
    ],
)
def test_typed_value(schema, text, value):
    found = typed_value(text, schema, DEFS)
    assert (found, type(found)) == (value, type(value))
