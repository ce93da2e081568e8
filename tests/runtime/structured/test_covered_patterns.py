"""Pattern properties that match declared properties only."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from structured_engine import structured_engine

from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured import covered_patterns
from torch_pagoda.runtime.structured.grammar import check_structured
from torch_pagoda.runtime.structured.json_schema import checked_schema

from toy_program import character_tokenizer

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SMALL = {"maximum": 3}


def closed(properties: dict[str, Any], patterns: dict[str, Any], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "patternProperties": patterns}
    return {**schema, "required": list(properties), "additionalProperties": False, **more}


COVERED = [
    closed({"score": DIGIT}, {"^score$": DIGIT}),
    closed({"score": DIGIT}, {"^score$": SMALL}),
    closed({"a": DIGIT, "b": DIGIT}, {"^(a|b)$": SMALL}),
    closed({"a": DIGIT, "b": DIGIT}, {"^a$": SMALL, "^b$": DIGIT}),
    closed({"a": DIGIT, "b": {"const": "x"}}, {"^a$": SMALL}),
    closed({"a": DIGIT}, {"^a$": SMALL}, required=[]),
    closed({'é"\n': DIGIT}, {'^é"\n$': SMALL}),
    closed({"a": closed({"b": DIGIT}, {"^b$": SMALL})}, {"^a$": {}}),
    {"$defs": {"d": closed({"b": DIGIT}, {"^b$": SMALL})}, "$ref": "#/$defs/d"},
    {"type": "array", "minItems": 1, "maxItems": 2, "items": closed({"b": DIGIT}, {"^b$": SMALL})},
]
FREE = [
    closed({"a": DIGIT}, {"^x$": DIGIT}, maxProperties=3),
    closed({"a": DIGIT, "b": DIGIT}, {"^a$": DIGIT, "^[bc]$": DIGIT}, maxProperties=4),
    closed({"a": DIGIT}, {"^a$": DIGIT}, additionalProperties=DIGIT, maxProperties=3),
    {"const": closed({"a": DIGIT}, {"^a$": DIGIT})},
]


@pytest.mark.parametrize("strict", [True, False])
def test_outputs_fit(strict: bool) -> None:
    schemas = (*COVERED, *FREE)
    each = [
        SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=100, structured_outputs={"json": s, "strict": strict})
        for s in schemas
    ]
    for schema, output in zip(schemas, structured_engine().generate(["a"] * len(each), each), strict=True):
        for answer in output.outputs:
            assert answer.error is None and (answer.finish_reason == "stop" or schema in FREE)
            if answer.finish_reason == "stop":
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))


def test_schemas_without_them_stay_as_they_are() -> None:
    assert [checked_schema("x", schema) for schema in FREE] == FREE


def test_tags_hold_to_them_and_grammars_say_so() -> None:
    schema = COVERED[1]
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": "."}], "triggers": ["<f>"]}
    assert check_structured({"structural_tag": tag}, character_tokenizer()) == []
    with pytest.raises(ValueError, match=r"structured_outputs.grammar %json 1 has patternProperties that match decl"):
        check_structured({"grammar": f"start: %json {json.dumps(schema)}"}, character_tokenizer())


def test_many_patterns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to compile them grows with more than their square."""
    many = closed({"a": DIGIT}, {f"^x{i}$": DIGIT for i in range(101)})
    with pytest.raises(ValueError, match="more than 100 patternProperties in one object"):
        checked_schema("x", many)
    monkeypatch.setattr(covered_patterns, "MAX_PROBES", 20)
    with pytest.raises(ValueError, match="too many patternProperties where additionalProperties is false"):
        checked_schema("x", {"anyOf": [closed({f"n{i}": DIGIT}, {f"^n{i}$": {}}) for i in range(9)]})


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = DIGIT
    for _ in range(3000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        checked_schema("x", deep)
