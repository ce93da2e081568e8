"""Messages, tools and template variables of a chat request, validated and rendered."""

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
    """The callable tools, and whether a call is required.

    Raises:
        ApiError: 400; the choice does not match the tools, or the model cannot call any.
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
        text = "this model's chat template does not support tools"
        if front.template_facts.takes_tools:
            text = "this model's chat template supports tools, but the format of its calls is unknown"
        refuse("tools", f"{text}; omit tools, or start the server with --tool-call-parser", "unsupported_parameter")
    return left, choice


def call_grammar(
    front: Front, body: ChatBody, tools: list[Tool], choice: ToolChoice, prompt: str
) -> tuple[str | None, list[str]]:
    """The grammar for tool calls, and the parts of the tools' schemas it does not enforce; None: unconstrained.

    ``prompt`` is the text before the output.

    Raises:
        ApiError: 400; the calls must be enforced, which the model's format does not allow.
    """
    assert front.formats is not None
    strict = any(tool.strict for tool in tools)
    if choice.mode != "required" and not strict:
        return None, []
    prepare = partial(embedded_schema, "the schema of a tool's parameters", lenient=not strict)
    parallel = body.parallel_tool_calls is not False
    try:
        grammar = front.formats.grammar(tools, choice, parallel=parallel, prepare=prepare, prompt_text=prompt)
    except ValueError as error:
        raise ApiError(400, "invalid_schema", str(error), param="tools") from error
    if grammar is None and choice.mode == "required":
        text = "tool calls cannot be enforced in this model's format; use tool_choice='auto'"
        refuse("tool_choice", text, "unsupported_parameter")
    return grammar, _left_out(front.formats, body, tools, grammar is not None)


def _left_out(formats: AnyFormat, body: ChatBody, tools: list[Tool], is_held: bool) -> list[str]:
    """The parts of the tools' schemas that are not enforced; ``is_held``: a grammar constrains the calls.

    Raises:
        ApiError: 400; a tool is strict, and a part of its schema is not enforced.
    """
    found = []
    for tool in tools:
        place = f"tools[{(body.tools or []).index(dict(tool.declaration))}] ({tool.name})"
        if tool.strict and not is_held:
            has_grammar = isinstance(formats, Format) and formats.calls is not None and formats.calls.grammar
            remedy = "use tool_choice='required', or omit strict" if has_grammar else "omit strict"
            text = f"{place} is strict, but optional calls cannot be enforced in this model's format; {remedy}"
            refuse("tools", text, "unsupported_parameter")
        parts = formats.left_out(tool) if isinstance(formats, Format) else []
        if tool.strict and parts:
            text = f"{place} is strict, but this model's format cannot enforce these parts of its schema: "
            refuse("tools", f"{text}{', '.join(parts)}; change them, or omit strict", "invalid_schema")
        found += [f"{place}: {part}" for part in parts]
    return found


def may_reason(formats: AnyFormat) -> bool:
    """Whether the output may contain reasoning."""
    return not isinstance(formats, Format) or formats.reasoning is not None


def reasoning_ahead(formats: AnyFormat, prompt: str) -> str | tuple[str, ...] | None:
    """The text, or texts in sequence, after which the answer begins; None if the prompt ends there.

    A constraint on the answer begins after it. A model that would open its reasoning itself answers at once.

    Raises:
        ApiError: 400; there is no single such text.
    """
    try:
        return formats.reasoning_ahead(prompt)
    except ValueError as error:
        remedy = "disable reasoning, or omit the constraint"
        refuse("response_format", f"{error}, so no grammar can begin after it; {remedy}")


async def prompt_of(
    front: Front,
    body: ChatBody,
    tools: list[dict[str, Any]] | None,
    max_model_len: int,
    *,
    name: str = "messages",
    places: list[str] | None = None,
) -> Prompt:
    """Render the conversation as a prompt.

    Args:
        front, body: of the request.
        tools: passed to the template.
        max_model_len: the context length.
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
        remedy = "omit it, or start the server with --trust-request-chat-template"
        refuse("chat_template", f"chat_template is not accepted in requests; {remedy}", "unsupported_parameter")
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
