"""Validation of a request's ``tools`` and ``tool_choice``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_TOOLS = 128
MAX_TOOL_SIZE = 256 * 1024
"""Maximum size of one tool's declaration: characters of its strings plus its number of values."""
MAX_TOOLS_SIZE = 1024 * 1024
"""Maximum size of all tools together."""
MAX_SCHEMA_DEPTH = 64

TOOL_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:/-]{0,126}[A-Za-z0-9_])?", re.ASCII)
"""Names of functions: OpenAI's, and those with dots, colons and slashes of MCP servers."""

_PARAMETER_NAME = re.compile(r"[^<>\"'\x00-\x1f\x7f]{1,256}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: matches ``TOOL_NAME``; no other tool of the request has it.
        parameters: JSON schema of its arguments, an object's.
        strict: calls must fit the schema.
        declaration: the tool as the client sent it, for the chat template.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    declaration: Mapping[str, Any]


@dataclass(frozen=True)
class ToolChoice:
    """The tools that may be called.

    Attributes:
        mode: ``"none"``, ``"auto"``: the model decides, ``"required"``: at least one.
        names: the allowed ones; None: any. With ``"required"`` and one name: that one.
        once: a single call, which clients expect if they name the function.
    """

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    once: bool = False


def check_tools(tools: Any) -> list[Tool]:
    """The tools of a request.

    Args:
        tools: the request's field, or None.

    Raises:
        ValueError: OpenAI's API would reject it, or it is too large; the message names the field.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise ValueError(
            "tools is not an array; pass [{'type': 'function', 'function': {'name': ..., 'parameters': ...}}]"
        )
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} entries; pass at most {MAX_TOOLS}")
    checked: list[Tool] = []
    names: dict[str, int] = {}
    size = 0
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        size += _check_size(tool, place)
        if size > MAX_TOOLS_SIZE:
            raise ValueError(f"tools exceeds {MAX_TOOLS_SIZE} characters at {place}; shorten the declarations")
        checked.append(_check_tool(tool, place))
        first = names.setdefault(checked[-1].name, index)
        if first != index:
            raise ValueError(
                f"{place}.function.name={checked[-1].name!r} duplicates tools[{first}]; rename one of them"
            )
    return checked


def check_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The ``tool_choice`` of a request; if absent (None), ``"auto"`` with tools and ``"none"`` without.

    Raises:
        ValueError: OpenAI's API would reject it, or it names a tool that the request lacks.
    """
    if choice is None or choice == "auto":
        return ToolChoice("auto" if tools else "none")
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        if not tools:
            raise ValueError("tool_choice='required' needs tools; pass tools")
        return ToolChoice("required")
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        return ToolChoice("required", _known([name], tools, "tool_choice.function.name"), once=True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not 0 < len(listed) <= MAX_TOOLS:
            raise ValueError(
                "tool_choice.allowed_tools is invalid; pass {'mode': 'auto' or 'required', 'tools': [...]}"
            )
        return ToolChoice(mode, _known([_name_of(tool) for tool in listed], tools, "tool_choice.allowed_tools.tools"))
    raise ValueError(
        "tool_choice is invalid; use 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}"
    )


def chosen(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """The tools that a choice allows."""
    if choice.mode == "none":
        return []
    return [tool for tool in tools if choice.names is None or tool.name in choice.names]


def _name_of(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return (
        function.get("name") if isinstance(function, dict) else tool.get("name") if isinstance(tool, dict) else None
    )


def _known(names: Sequence[Any], tools: Sequence[Tool], place: str) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or all(tool.name != name for tool in tools):
            raise ValueError(
                f"{place}={str(name)[:80]!r} is not a tool of this request; use the name of one of tools"
            )
    return tuple(dict.fromkeys(names))


def _check_tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise ValueError(f"{place} is not of type 'function'; pass {{'type': 'function', 'function': {{...}}}}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{place}.function is not an object; pass {{'name': ..., 'parameters': {{...}}}}")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise ValueError(
            f"{place}.function.name={str(name)[:80]!r} is not a valid name; use up to 128 letters, digits and "
            "_ . : / -, beginning and ending with a letter, a digit or _"
        )
    if not isinstance(function.get("description", ""), str | None):
        raise ValueError(f"{place}.function.description is not a string; pass a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{place}.function.strict is not a boolean; pass true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    _check_parameters(parameters, f"{place}.function.parameters")
    return Tool(name, parameters, bool(strict), tool)


def _check_parameters(parameters: Any, place: str) -> None:
    if not isinstance(parameters, dict):
        raise ValueError(f"{place} is not a JSON schema; pass {{'type': 'object', 'properties': {{...}}}}")
    if parameters.get("type", "object") != "object":
        raise ValueError(f"{place}.type is not 'object'; use 'object'")
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise ValueError(f"{place}.properties is not an object; pass an object")
    for name, schema in properties.items():
        if not _PARAMETER_NAME.fullmatch(name):
            raise ValueError(
                f"{place}.properties has {name[:80]!r}, which tool-call formats cannot represent; use a name of 1 to "
                "256 characters other than quotes, <, > and control characters"
            )
        if not isinstance(schema, dict | bool):
            raise ValueError(f"{place}.properties[{name!r}] is not a JSON schema")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"{place}.required is not an array of strings")


def _check_size(tool: Any, place: str) -> int:
    """Characters of all strings plus one for every other value; bounds its own recursion."""
    size = 0
    level: list[Any] = [tool]
    for _ in range(MAX_SCHEMA_DEPTH):
        deeper: list[Any] = []
        for value in level:
            size += 1 + (len(value) if isinstance(value, str) else 0)
            if isinstance(value, dict):
                size += sum(map(len, value))
                deeper += value.values()
            elif isinstance(value, list):
                deeper += value
        if size > MAX_TOOL_SIZE:
            raise ValueError(f"{place} exceeds {MAX_TOOL_SIZE} characters; shorten it")
        if not deeper:
            return size
        level = deeper
    raise ValueError(f"{place} is nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten its schema")
