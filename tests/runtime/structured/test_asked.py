"""Requests for structured output: read, bounded, refused with a reason; SamplingParams that carry it."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured import asked
from torch_pagoda.runtime.structured.asked import AskedOutput, read_structured_outputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
GOOD: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": True},
    {"json": "{}"},
    {"json_object": True},
    {"regex": "[0-9]+"},
    {"choice": ["yes", "no"]},
    {"choice": ("yes",)},
    {"grammar": 'start: "a"'},
    {"structural_tag": TAG},
    {"structural_tag": json.dumps(TAG)},
    {"regex": "a", "after": ["<|channel|>final", "<|message|>"]},
    {"json": SCHEMA, "strict": False, "whitespace": "any", "after": [3, 4]},
    {"regex": "a", "json": None, "after": "</think>"},
]


@pytest.mark.parametrize("value", GOOD, ids=lambda value: "+".join(value))
def test_what_is_taken(value: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=value, n=2, seed=1)
    assert not params.is_plain and not params.changes_logits
    # It crosses a wire as plain JSON, and stays what it is through copies.
    sent = json.loads(json.dumps(params.structured_outputs))
    for other in (
        SamplingParams(structured_outputs=sent, n=2, seed=1),
        SamplingParams(structured_outputs=params.structured_outputs, n=2, seed=1),
        copy.copy(params),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
    ):
        assert other == params and other.asked_output == params.asked_output
        assert hash(other) == hash(params)
    own = params.completion(1)
    assert own.asked_output is params.asked_output and not own.is_plain


def test_what_it_is_read_as() -> None:
    assert read_structured_outputs({"json_object": True}) == AskedOutput("json", {"type": "object"})
    assert read_structured_outputs({"json": '{"type": "null"}'}).value == {"type": "null"}
    assert read_structured_outputs({"choice": ["a", "b", "a"]}).value == ["a", "b"]
    assert read_structured_outputs(GOOD[-2]) == AskedOutput("json", SCHEMA, False, "any", (3, 4))
    assert read_structured_outputs({"structural_tag": TAG}).value["structures"][0]["trigger"] == "<f"


def test_nothing_is_kept_of_what_the_caller_changes() -> None:
    schema = copy.deepcopy(SCHEMA)
    params = SamplingParams(structured_outputs={"json": schema})
    schema["properties"]["a"]["type"] = "string"  # type: ignore[index]
    assert params.structured_outputs == {"json": SCHEMA} and params.asked_output is not None
    assert params.asked_output.value == SCHEMA


def test_nobody_pays_who_does_not_ask() -> None:
    params = SamplingParams(temperature=0)
    assert params.structured_outputs is None and params.asked_output is None and params.is_plain


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def loop() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("regex", "structured_outputs='regex' is not a mapping"),
        ({}, "has nothing; use one of json"),
        ({"json": None}, "has nothing"),
        ({"strict": True}, "has nothing"),
        ({"json": SCHEMA, "regex": "a"}, "has json and regex"),
        ({"jsn": SCHEMA}, "'jsn', which is unknown"),
        ({3: SCHEMA}, "3, which is unknown"),
        ({"json": 3}, "structured_outputs.json=3 is not a JSON schema"),
        ({"json": [SCHEMA]}, "is not a JSON schema"),
        ({"json": "{"}, "structured_outputs.json is not JSON"),
        ({"json": "3"}, "is not a JSON schema"),
        ({"json": '{"maximum": NaN}'}, "NaN is not JSON"),
        ({"json": "[" * 100_000}, "is not JSON"),
        ({"json": {"maximum": float("nan")}}, "structured_outputs.json is not JSON"),
        ({"json": {"const": object()}}, "which is not JSON"),
        ({"json": {"const": {1: 2}}}, "has the key 1"),
        ({"json": {"const": "\ud800"}}, "is not JSON"),
        ({"json": nested(asked.MAX_DEPTH)}, "nested deeper than 64"),
        ({"json": nested(100_000)}, "nested deeper than 64"),
        ({"json": loop()}, "nested deeper than 64"),
        ({"json": {"enum": ["x" * 1000] * 1000}}, "above the limit of 256000"),
        ({"json": {"enum": [0] * 300_000}}, "more than 256000 entries"),
        ({"json_object": False}, "json_object=False is not True"),
        ({"json_object": 1}, "json_object=1 is not True"),
        ({"regex": ""}, "structured_outputs.regex='' is not text"),
        ({"regex": 3}, "structured_outputs.regex=3 is not text"),
        ({"regex": "x" * 300_000}, "above the limit of 256000"),
        ({"regex": "\ud800"}, "half a surrogate pair"),
        ({"regex": "a\0"}, "NUL"),
        ({"choice": "yes"}, "is not a list of texts"),
        ({"choice": []}, "is not a list of texts"),
        ({"choice": ["a", 3]}, r"choice\[1\]=3 is not text"),
        ({"choice": ["a", ""]}, r"choice\[1\]='' is not text"),
        ({"choice": [str(i) for i in range(10_001)]}, "above the limit of 10000"),
        ({"choice": ["x" * 60_000 + str(i) for i in range(5)]}, "more than 256000 characters"),
        ({"grammar": None, "choice": {"a": 1}}, "is not a list of texts"),
        ({"structural_tag": []}, "is not a mapping"),
        ({"structural_tag": {}}, "structures is not a list"),
        ({"structural_tag": {**TAG, "triggers": []}}, "triggers is not a list"),
        ({"structural_tag": {**TAG, "triggers": ["<g"]}}, "starts with none of the triggers"),
        ({"structural_tag": {**TAG, "structures": [{"begin": "<f"}]}}, "no begin or no end"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": b, "end": ""} for b in ("<f=a", "f(")],
                    "triggers": ["<f=", "f"],
                }
            },
            r"structures\[0\] can never be generated: its trigger '<f=' contains the trigger 'f'",
        ),
        ({"structural_tag": {**TAG, "structures": [{"begin": "<f", "end": 3}]}}, "end=3 is not text"),
        ({"structural_tag": {**TAG, "structures": TAG["structures"] * 200}}, "list of 1 to 128"),
        ({"json": SCHEMA, "strict": 1}, "strict=1 is not a bool"),
        ({"json": SCHEMA, "whitespace": "some"}, "whitespace='some' is unknown"),
        ({"json": SCHEMA, "after": []}, "after="),
        ({"json": SCHEMA, "after": [True]}, "after="),
        ({"json": SCHEMA, "after": ["a", 1]}, "after="),
        ({"json": SCHEMA, "after": ["a", ""]}, "after="),
        ({"json": SCHEMA, "after": ["x" * 60, "y" * 5]}, "above the limit of 64"),
        ({"json": SCHEMA, "after": [-1]}, "after="),
        ({"json": SCHEMA, "after": ""}, "after="),
        ({"json": SCHEMA, "after": "x" * 65}, "above the limit of 64"),
        ({"json": SCHEMA, "after": list(range(65))}, "after="),
    ],
)
def test_what_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        SamplingParams(structured_outputs=value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
