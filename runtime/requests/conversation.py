"""Renders conversations as text: OpenAI's messages through a tokenizer's chat template."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .checks import shown
from .template_messages import ConversationError, template_messages
from .template_views import hidden_parts, known_template

Message: TypeAlias = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` in OpenAI's form; content is text or a list of ``{"type": "text"}`` parts."""

_MOST_REASON = 300
"""Most characters of a template's own error that our error shows."""


class TemplateRefusal(ConversationError):
    """The chat template itself rejected the conversation.

    Args:
        name: name of the conversation in errors.
        error: the exception that the template raised.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        reason = " ".join(str(error).split())[:_MOST_REASON] or "no reason given"
        self.reason = f"{type(error).__name__}: {reason}"
        super().__init__(name, f"{name}: the chat template rejects the conversation: {self.reason}")


def render_conversation(
    tokenizer: Any,
    conversation: Sequence[Message],
    name: str = "messages",
    *,
    places: Sequence[str] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation as text with special tokens, so the tokenizer must not add any.

    ``template_messages`` converts the messages to the form that the template accepts. Parts that the template would
    drop silently (tools, a message, a call) are rejected.

    Args:
        tokenizer: a HuggingFace tokenizer with the template.
        conversation: messages.
        name: name of the conversation in errors.
        places: names of the messages in errors; None: ``name`` with their indices.
        chat_template: used instead of the tokenizer's.
        add_generation_prompt: end where the answer begins.
        continue_final_message: end within the last message, so that the model continues it.
        tools: functions that the model may call, as JSON schemas.
        documents: texts to answer from, for templates that support them.
        chat_template_kwargs: further variables of the template.

    Raises:
        ConversationError: there is no template, the template rejects the conversation or does not show all of it,
            or options or messages do not fit.
    """
    if add_generation_prompt and continue_final_message:
        raise ConversationError(
            "add_generation_prompt",
            "add_generation_prompt=True and continue_final_message=True are mutually exclusive; pass "
            "add_generation_prompt=False to continue the last message",
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        text = "the tokenizer has no chat template; pass chat_template=, or generate from a text prompt"
        raise ConversationError(name, text)
    variables = _variables(tokenizer, chat_template_kwargs)
    places = places or [f"{name}[{i}]" for i in range(len(conversation))]
    given = [dict(tool) for tool in tools] if tools else None
    try:
        source = tokenizer.get_chat_template(chat_template, given)  # a name may choose one of several
        template = known_template(tokenizer, source)
        messages = template_messages(conversation, template.facts, places)
        if continue_final_message and conversation and conversation[-1].get("tool_calls"):
            text = f"{places[-1]} ends in a tool call, which cannot be continued; send the tool's result"
            raise ConversationError(places[-1], text)
        arguments = {
            "chat_template": source,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": given,
            **({"documents": [dict(document) for document in documents]} if documents else {}),
            **variables,
        }
        if hidden := hidden_parts(template, tokenizer, messages, arguments):
            raise _not_shown(messages, places, *hidden[0])
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
    except (ConversationError, MemoryError):
        raise
    except Exception as error:
        raise TemplateRefusal(name, error) from error


def _variables(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    variables = dict(chat_template_kwargs or {})
    own = template_arguments(tokenizer) if variables else frozenset()
    if taken := sorted(str(key) for key in variables if key in own):
        text = f"chat_template_kwargs={shown(taken)} are reserved by the tokenizer; remove them"
        raise ConversationError("chat_template_kwargs", text)
    return variables


def _not_shown(messages: Sequence[Message], places: Sequence[str], index: int, what: str) -> ConversationError:
    if index < 0:
        text = f"{what}: the chat template does not show {what} to the model; remove them or use another template"
        return ConversationError(what, text)
    role, field = messages[index]["role"], f"{places[index]}.{what}"
    if what == "tool_calls":
        text = f"{field}: the chat template does not show these tool calls; write them as text"
    else:
        text = f"{field}: the chat template does not show a message with role {role!r} here; use another role"
    return ConversationError(field, text)


def template_arguments(tokenizer: Any) -> frozenset[str]:
    """Return the argument names that a tokenizer's ``apply_chat_template`` takes for itself."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
