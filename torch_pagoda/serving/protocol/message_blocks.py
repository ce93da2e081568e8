"""Converts the input of ``/v1/messages`` to the messages and tools of a chat request."""

from __future__ import annotations

from typing import Any

import msgspec

from ...runtime.requests.checks import shown
from ..http.errors import refuse

_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Role → block types that its messages may contain."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_messages(
    messages: list[dict[str, Any]], system: str | list[Any] | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages of a chat request, and the field name of each; consecutive turns of one role are joined.

    Args:
        messages: content is text, or a list of blocks.
        system: becomes the first message.

    Raises:
        ApiError: 400; a block is unsupported or malformed.
    """
    found: list[dict[str, Any]] = []
    places: list[str] = []
    if system:
        found.append({"role": "system", "content": _texts(system, "system")})
        places.append("system")
    for i, message in enumerate(messages):
        where, role = f"messages[{i}]", message.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            refuse(f"{where}.role", f"{where}.role={shown(role)} is not known; use 'user' or 'assistant'")
        blocks = _blocks(message.get("content"), f"{where}.content", _BLOCKS[role])
        if not blocks and (role != "assistant" or i + 1 < len(messages)):
            refuse(f"{where}.content", f"{where}.content=[] is empty; send text, or at least one block")
        turn = [_of_assistant(blocks, f"{where}.content")] if role == "assistant" else []
        for part in turn or _of_user(blocks, f"{where}.content", role):
            if found and part["role"] == found[-1]["role"] in ("user", "assistant"):
                for name in part.keys() - {"role"}:
                    found[-1][name] = found[-1].get(name, type(part[name])()) + part[name]
            else:
                found.append(part)
                places.append(where)
    return found, places


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools of a chat request.

    Raises:
        ApiError: 400; a tool is not the client's own.
    """
    found = []
    for i, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            text = f"tools[{i}].type={shown(tool['type'])} is not supported; send tools with an input_schema"
            refuse(f"tools[{i}].type", text, "unsupported_parameter")
        if not isinstance(tool.get("input_schema"), dict):
            refuse(f"tools[{i}].input_schema", f"tools[{i}].input_schema is missing; send a JSON schema")
        function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def chat_tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    """``tool_choice`` of a chat request.

    Raises:
        ApiError: 400.
    """
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        refuse("tool_choice.type", f"tool_choice.type={shown(kind)} is not known; use auto, any, tool or none")
    return _CHOICES[kind]


def _of_user(blocks: list[dict[str, Any]], where: str, role: str) -> list[dict[str, Any]]:
    """One message per tool result and per run of text, in order.

    A tool's failure is stated before its result, as templates have no field for it.
    """
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            content = block.get("content")
            result = [] if content in (None, "") else _texts(content, f"{where}[{i}].content")
            if block.get("is_error"):
                result[:1] = [f"Error: {result[0]}" if result else "Error"]
            call_id = _text(block, "tool_use_id", f"{where}[{i}]")
            if texts:
                found.append({"role": role, "content": texts})
                texts = []
            found.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            texts.append(_text(block, "text", f"{where}[{i}]"))
    if texts:
        found.append({"role": role, "content": texts})
    return found


def _of_assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        if block["type"] == "text":
            texts.append(_text(block, "text", at))
        elif block["type"] == "thinking":
            thoughts.append(_text(block, "thinking", at))
        elif block["type"] == "tool_use":
            if not isinstance(block.get("input"), dict):
                refuse(f"{at}.input", f"{at}.input={shown(block.get('input'))} is not an object; send the arguments")
            arguments = msgspec.json.encode(block["input"]).decode()
            function = {"name": _text(block, "name", at), "arguments": arguments}
            calls.append({"id": _text(block, "id", at), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(content: Any, where: str) -> list[str]:
    blocks = _blocks(content, where, ("text",))
    return [_text(block, "text", f"{where}[{i}]") for i, block in enumerate(blocks)]


def _blocks(content: Any, where: str, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Content as a list of blocks of these types."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        refuse(where, f"{where}={shown(content)} is not content; send text or a list of blocks")
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            text = f"{where}[{i}].type={shown(kind)} is not supported here; send {' or '.join(kinds)}"
            refuse(f"{where}[{i}].type", text, "unsupported_parameter")
    return content


def _text(block: dict[str, Any], name: str, where: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        refuse(f"{where}.{name}", f"{where}.{name}={shown(found)} is not a string; send a string")
    return found
