"""Messages, tools and template variables of a chat request, checked and rendered."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...runtime.requests.checks import shown
from ...runtime.structured.json_schema import embedded_schema
from ..formats.format import Format
from ..formats.harmony import HarmonyFormat, one_text_before_call
from ..formats.registry import AnyFormat
from ..formats.tools import Tool, ToolChoice, check_tool_choice, check_tools, chosen
from ..generation.front import Front
from ..generation.prompts import Prompt
from ..http.errors import ApiError, refuse
from .fields import ChatBody

_ROLES = ("system", "developer", "user", "assistant", "tool")


def tools_of(front: Front, body: ChatBody) -> tuple[list[Tool], ToolChoice]:
    """The tools that the model may call, and whether it has to.

    Raises:
        ApiError: 400; the choice does not fit the tools, or this model cannot call any.
    """
    try:
        tools = check_tools(body.tools)
    except ValueError as error:
        raise ApiError(400, "invalid_value", str(error), param="tools") from error
    try:
        choice = check_tool_choice(body.tool_choice, tools)
    except ValueError as error:
        raise ApiError(400, "invalid_value", str(error), param="tool_choice") from error
    left = chosen(tools, choice)
    if left and (front.formats is None or not front.formats.calls_tools):
        text = "this model's template does not take tools"
        if front.template_facts.takes_tools:
            text = "this model's template takes tools, but it is not known how the model writes its calls"
        refuse("tools", f"{text}; leave tools out, or start with --tool-call-parser", "unsupported_parameter")
    return left, choice


def call_grammar(
    front: Front, body: ChatBody, tools: list[Tool], choice: ToolChoice, prompt: str
) -> tuple[str | None, list[str]]:
    """The grammar that calls are held to, and what of the tools' schemas it does not say; None: the model is free.

    ``prompt`` is the text behind which it begins.

    Raises:
        ApiError: 400; calls are to be enforced, which this model's format does not allow.
    """
    assert front.formats is not None
    strict = any(tool.strict for tool in tools)
    if choice.mode != "required" and not strict:
        return None, []
    prepare = partial(embedded_schema, "tools: a schema of parameters", lenient=not strict)
    parallel = body.parallel_tool_calls is not False
    try:
        grammar = front.formats.grammar(tools, choice, parallel=parallel, prepare=prepare, prompt_text=prompt)
    except ValueError as error:
        raise ApiError(400, "invalid_schema", str(error), param="tools") from error
    if grammar is None and choice.mode == "required":
        text = "calls cannot be enforced in this model's format; use tool_choice='auto'"
        refuse("tool_choice", text, "unsupported_parameter")
    return grammar, _left_out(front.formats, body, tools, grammar is not None)


def _left_out(formats: AnyFormat, body: ChatBody, tools: list[Tool], is_held: bool) -> list[str]:
    """What of the tools' schemas calls need not fit, though a grammar holds them if ``is_held``.

    Raises:
        ApiError: 400; a tool is strict, and something of it is left out.
    """
    found = []
    for tool in tools:
        place = f"tools[{(body.tools or []).index(dict(tool.declaration))}] ({tool.name})"
        if tool.strict and not is_held:
            has_grammar = isinstance(formats, Format) and formats.calls is not None and formats.calls.grammar
            remedy = "use tool_choice='required', or leave strict out" if has_grammar else "leave strict out"
            text = f"{place} is strict, and calls within text cannot be enforced in this model's format; {remedy}"
            refuse("tools", text, "unsupported_parameter")
        parts = formats.left_out(tool) if isinstance(formats, Format) else []
        if tool.strict and parts:
            text = f"{place} is strict, and in this model's format these parts of its schema cannot be enforced: "
            refuse("tools", f"{text}{', '.join(parts)}; change them, or leave strict out", "invalid_schema")
        found += [f"{place}: {part}" for part in parts]
    return found


def may_reason(formats: AnyFormat) -> bool:
    """True if answers may hold reasoning."""
    return not isinstance(formats, Format) or formats.reasoning is not None


def reasoning_ahead(formats: AnyFormat, prompt: str) -> str | tuple[str, ...] | None:
    """The text, or texts one after the other, behind which the answer begins; None where the prompt ends there.

    A constraint on the answer begins behind it. A model that would open its reasoning itself answers at once.

    Raises:
        ApiError: 400; no one text does.
    """
    try:
        return formats.reasoning_ahead(prompt)
    except ValueError as error:
        remedy = "ask for an answer without reasoning, or leave the constraint out"
        refuse("response_format", f"{error}, so that no grammar can begin behind it; {remedy}")


async def prompt_of(
    front: Front,
    body: ChatBody,
    tools: list[dict[str, Any]] | None,
    max_model_len: int,
    *,
    name: str = "messages",
    places: list[str] | None = None,
) -> Prompt:
    """The conversation as a prompt.

    Args:
        front, body: of the request.
        tools: for the template.
        max_model_len: what can run.
        name: of the conversation's field, for errors.
        places: names of its messages, for errors; None: ``name`` with their indices.

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
        [one_text_before_call(message) for message in body.messages]
        if isinstance(front.formats, HarmonyFormat)
        else body.messages,
        max_model_len,
        name,
        places=places,
        chat_template=body.chat_template,
        chat_template_kwargs=variables,
        add_special_tokens=bool(body.add_special_tokens),
        ends=body.truncate_prompt_tokens is not None,
        add_generation_prompt=(not continues) if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        tools=tools,
        documents=body.documents,
    )
