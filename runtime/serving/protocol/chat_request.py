"""Messages, tools and template variables of a chat request, checked and rendered."""

from __future__ import annotations

from typing import Any

from ...requests.checks import shown
from ..errors import refuse
from ..front import Front
from ..prompts import Prompt
from .fields import ChatBody

_ROLES = ("system", "developer", "user", "assistant", "tool")


def chosen_tools(front: Front, body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools that the model may call; None: none.

    Raises:
        ApiError: 400; the choice does not fit the tools, or this model cannot call any.
    """
    choice = body.tool_choice
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        refuse("tools", f"tools have the names {shown(names)}; give each a name of its own")
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None
    if not tools:
        refuse("tool_choice", f"tool_choice={shown(choice)} needs tools; send some, or leave it out")
    if isinstance(choice, dict):
        tools = _allowed(choice, tools)
    elif choice not in (None, "auto", "required"):
        remedy = "use 'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}"
        refuse("tool_choice", f"tool_choice={shown(choice)} is not known; {remedy}")
    if front.formats is None or not front.formats.takes_tools:
        text = "this model's template does not take tools; leave tools out, or start with --tool-call-parser"
        refuse("tools", text, "unsupported_parameter")
    return tools


async def prompt_of(front: Front, body: ChatBody, tools: list[dict[str, Any]] | None, max_model_len: int) -> Prompt:
    """The conversation as a prompt.

    Raises:
        ApiError: 400.
    """
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if role not in _ROLES:
            refuse(
                f"messages[{i}].role",
                f"messages[{i}].role={shown(role)} is not known; use one of {', '.join(_ROLES)}",
            )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.chat_template is not None and not front.settings.trust_request_chat_template:
        remedy = "leave it out, or start with --trust-request-chat-template"
        refuse("chat_template", f"chat_template is not taken from requests; {remedy}", "unsupported_parameter")
    continues = bool(body.continue_final_message)
    return await front.prompts.of_messages(
        [_with_both_reasonings(message) for message in body.messages],
        max_model_len,
        chat_template=body.chat_template,
        chat_template_kwargs=variables,
        add_special_tokens=bool(body.add_special_tokens),
        add_generation_prompt=(not continues) if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        tools=tools,
        documents=body.documents,
    )


def _with_both_reasonings(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both names that templates read."""
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if not isinstance(reasoning, str):
        return message
    return {**message, "reasoning_content": reasoning, "reasoning": reasoning}


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that a ``tool_choice`` object leaves."""
    kind = choice.get("type")
    if kind == "function":
        wanted = [choice.get("function")]
    elif kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        entries = inner.get("tools") if isinstance(inner, dict) else None
        if not isinstance(entries, list) or not entries:
            refuse("tool_choice", "tool_choice.allowed_tools.tools is empty; name at least one of the tools")
        wanted = [entry.get("function", entry) if isinstance(entry, dict) else None for entry in entries]
    else:
        refuse("tool_choice.type", f"tool_choice.type={shown(kind)} is not served; use 'function' or 'allowed_tools'")
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in wanted]
    by_name = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if not isinstance(name, str) or name not in by_name:
            refuse("tool_choice", f"tool_choice names {shown(name)}, which is not among the tools; name one of them")
    return [by_name[name] for name in by_name if name in names]
