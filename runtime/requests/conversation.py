"""Conversations as text: OpenAI's messages through a tokenizer's chat template."""

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
"""Characters of a template's refusal that an error shows."""


class TemplateRefusal(ConversationError):
    """A conversation that the chat template itself refuses.

    Args:
        name: of the conversation.
        error: that the template raised.
    """

    def __init__(self, name: str, error: BaseException) -> None:
        reason = " ".join(str(error).split())[:_MOST_REASON] or "no reason given"
        self.reason = f"{type(error).__name__}: {reason}"
        super().__init__(name, f"{name}: the chat template refuses them: {self.reason}")


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
    """The text of a conversation, special tokens included, so that the tokenizer is to add none.

    Messages are put into the form that the template takes, see ``template_messages``. What it would leave out
    without a word (tools, a message, a call) is refused.

    Args:
        tokenizer: a HuggingFace tokenizer, whose template it is.
        conversation: messages.
        name: of the conversation, for errors.
        places: names of the messages, for errors; None: ``name`` with their indices.
        chat_template: in place of the tokenizer's.
        add_generation_prompt: end where the answer begins.
        continue_final_message: end within the last message, for the model to go on with.
        tools: functions that the model may call, as JSON schemas.
        documents: texts to answer from, where the template knows of such.
        chat_template_kwargs: further variables of the template.

    Raises:
        ConversationError: there is no template, or it refuses the conversation, or does not show all of it; options
            or messages do not fit.
    """
    if add_generation_prompt and continue_final_message:
        raise ConversationError(
            "add_generation_prompt",
            "add_generation_prompt=True and continue_final_message=True exclude each other; pass "
            "add_generation_prompt=False to go on with the last message",
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        text = "the tokenizer has no chat template; pass chat_template=, or a text to generate"
        raise ConversationError(name, text)
    variables = _variables(tokenizer, chat_template_kwargs)
    places = places or [f"{name}[{i}]" for i in range(len(conversation))]
    given = [dict(tool) for tool in tools] if tools else None
    try:
        source = tokenizer.get_chat_template(chat_template, given)  # one of several, which a name may choose
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
        text = f"chat_template_kwargs={shown(taken)} are no variables of a template; leave them out"
        raise ConversationError("chat_template_kwargs", text)
    return variables


def _not_shown(messages: Sequence[Message], places: Sequence[str], index: int, what: str) -> ConversationError:
    if index < 0:
        text = f"{what}: the chat template shows no {what} to the model; leave them out, or use another template"
        return ConversationError(what, text)
    role, field = messages[index]["role"], f"{places[index]}.{what}"
    if what == "tool_calls":
        text = f"{field}: the chat template does not show such calls of tools; write them as text"
    else:
        text = f"{field}: the chat template shows no message of the role {role!r} here; use another role"
    return ConversationError(field, text)


def template_arguments(tokenizer: Any) -> frozenset[str]:
    """Names that a tokenizer's ``apply_chat_template`` takes for itself."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
