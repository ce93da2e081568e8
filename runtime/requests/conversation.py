"""Conversations as text: OpenAI's messages through a tokenizer's chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .checks import shown

Message: TypeAlias = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` in OpenAI's form; content is text or a list of ``{"type": "text"}`` parts."""

_MOST_REASON = 300
"""Characters of a template's refusal that an error shows."""


def render_conversation(
    tokenizer: Any,
    conversation: Sequence[Message],
    name: str = "messages",
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, special tokens included, so that the tokenizer is to add none.

    Args:
        tokenizer: a HuggingFace tokenizer, whose template it is.
        conversation: messages.
        name: of the conversation, for errors.
        chat_template, add_generation_prompt, continue_final_message, tools, documents, chat_template_kwargs: as for
            ``template_call``.

    Raises:
        ValueError: there is no template, or it refuses the conversation; options or messages do not fit.
    """
    messages, arguments = template_call(
        tokenizer,
        conversation,
        name,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        documents=documents,
        chat_template_kwargs=chat_template_kwargs,
    )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    except Exception as error:
        raise ValueError(f"{name}: the chat template refuses them: {template_refusal(error)}") from error


def template_call(
    tokenizer: Any,
    conversation: Sequence[Message],
    name: str = "messages",
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and the keywords with which ``apply_chat_template`` is called, ``tokenize`` apart.

    Args:
        tokenizer: a HuggingFace tokenizer, whose template it is.
        conversation: messages.
        name: of the conversation, for errors.
        chat_template: in place of the tokenizer's.
        add_generation_prompt: end where the answer begins.
        continue_final_message: end within the last message, for the model to go on with.
        tools: functions that the model may call, as JSON schemas.
        documents: texts to answer from, where the template knows of such.
        chat_template_kwargs: further variables of the template.

    Raises:
        ValueError: there is no template; options or messages do not fit.
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt=True and continue_final_message=True exclude each other; pass "
            "add_generation_prompt=False to go on with the last message"
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; pass chat_template=, or a text to generate")
    variables = dict(chat_template_kwargs or {})
    own = template_arguments(tokenizer) if variables else frozenset()
    if taken := sorted(str(key) for key in variables if key in own):
        raise ValueError(f"chat_template_kwargs={shown(taken)} are no variables of a template; leave them out")
    plain = [plain_message(message, f"{name}[{i}]") for i, message in enumerate(conversation)]
    if documents:
        variables["documents"] = [dict(document) for document in documents]
    return plain, {
        "chat_template": chat_template,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": [dict(tool) for tool in tools] if tools else None,
        **variables,
    }


def template_refusal(error: BaseException) -> str:
    """A template's own words, on one line."""
    reason = " ".join(str(error).split())[:_MOST_REASON] or "no reason given"
    return f"{type(error).__name__}: {reason}"


def template_arguments(tokenizer: Any) -> frozenset[str]:
    """Names that a tokenizer's ``apply_chat_template`` takes for itself."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


def plain_message(message: Any, name: str) -> dict[str, Any]:
    """The message as templates expect it: content as text, arguments of tool calls as objects.

    Raises:
        ValueError: it is no message, or has parts that are not text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name}={shown(message)} is no message; use {{'role': 'user', 'content': 'Hello'}}")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list | tuple):
        for part in content:
            if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise ValueError(
                    f"{name} has the part {shown(part)}, which is not served; leave parts of type 'text' only"
                )
        plain["content"] = "\n".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{name}['content']={shown(content)} is not text; use a string")
    if calls := plain.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise ValueError(f"{name}['tool_calls']={shown(calls)} is no list; use a list of calls")
        plain["tool_calls"] = [_with_object(call, name) for call in calls]
    return plain


def _with_object(call: Any, name: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} calls a tool with arguments={shown(function['arguments'])}, which is no JSON; give an object"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}
