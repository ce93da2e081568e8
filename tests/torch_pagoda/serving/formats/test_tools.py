"""Tools of a request are taken as OpenAI's API takes them, and refused by the place of the mistake."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.serving.formats import ToolChoice, check_tool_choice, check_tools
from torch_pagoda.serving.formats.tools import chosen


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_tools_are_taken():
    assert check_tools(None) == []
    first, second = check_tools(
        [tool(strict=True, parameters={"type": "object"}), tool("mcp.a/b:c-d", description=None)]
    )
    assert (first.name, first.strict, first.parameters) == ("f", True, {"type": "object"})
    assert (second.name, second.strict) == ("mcp.a/b:c-d", False)
    assert second.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    "tools, message",
    [
        ({}, "tools is not an array"),
        ([tool(f"f{i}") for i in range(129)], "tools has 129 entries"),
        ([3], r"tools\[0\] is not of type"),
        ([{"type": "custom"}], r"tools\[0\] is not of type"),
        ([{"type": "function"}], r"tools\[0\].function is not an object"),
        ([tool(None)], r"tools\[0\].function.name="),
        ([tool("")], r"tools\[0\].function.name="),
        ([tool("a b")], r"tools\[0\].function.name="),
        ([tool('a">')], r"tools\[0\].function.name="),
        ([tool("f\n")], r"tools\[0\].function.name="),
        ([tool("a" * 129)], r"tools\[0\].function.name="),
        ([tool("é")], r"tools\[0\].function.name="),
        ([tool(), tool()], r"tools\[1\].function.name='f' duplicates tools\[0\]"),
        ([tool(description=3)], "description is not a string"),
        ([tool(strict="yes")], "strict is not a boolean"),
        ([tool(parameters=[])], "parameters is not a JSON schema"),
        ([tool(parameters={"type": "string"})], "type is not 'object'"),
        ([tool(parameters={"properties": []})], "properties is not an object"),
        ([tool(parameters={"properties": {"a": 3}})], r"properties\['a'\] is not a JSON schema"),
        ([tool(parameters={"properties": {"<a>": {}}})], "properties has '<a>'"),
        ([tool(parameters={"required": "a"})], "required is not an array"),
        ([tool(parameters=nested(100_000))], r"tools\[0\] is nested deeper"),
        ([tool(description="x" * 300_000)], r"tools\[0\] exceeds"),
        ([tool(f"f{i}", description="x" * 200_000) for i in range(6)], "tools exceeds"),
    ],
)
def test_mistakes_are_named(tools, message):
    with pytest.raises(ValueError, match=message):
        check_tools(tools)


TOOLS = check_tools([tool("f"), tool("g")])
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}


@pytest.mark.parametrize(
    "choice, expected",
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "g"}}, ToolChoice("required", ("g",), once=True)),
        ({"type": "function", "name": "g"}, ToolChoice("required", ("g",), once=True)),
        (ALLOWED, ToolChoice("required", ("g",))),
        ({**ALLOWED["allowed_tools"], "type": "allowed_tools", "mode": "auto"}, ToolChoice("auto", ("g",))),  # type: ignore[dict-item]
    ],
)
def test_choices(choice, expected):
    assert check_tool_choice(choice, TOOLS) == expected
    assert [t.name for t in chosen(TOOLS, expected)] == {None: ["f", "g"], ("g",): ["g"]}[expected.names][
        : None if expected.mode != "none" else 0
    ]


@pytest.mark.parametrize(
    "choice, tools, message",
    [
        ("required", [], "needs tools"),
        ("maybe", TOOLS, "tool_choice is invalid"),
        (3, TOOLS, "tool_choice is invalid"),
        ({"type": "function", "function": {"name": "h"}}, TOOLS, "'h' is not a tool of this request"),
        ({"type": "function", "function": 3}, TOOLS, "is not a tool of this request"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}, TOOLS, "allowed_tools is invalid"),
        ({"type": "allowed_tools", "allowed_tools": 3}, TOOLS, "allowed_tools is invalid"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [3]}, TOOLS, "is not a tool of this request"),
    ],
)
def test_choices_that_do_not_fit(choice, tools, message):
    with pytest.raises(ValueError, match=message):
        check_tool_choice(choice, tools)


def test_no_tools_means_none():
    assert check_tool_choice(None, []) == ToolChoice("none")
