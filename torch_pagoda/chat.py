"""Conversations as prompts: the tokenizer's chat template, as in vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from .checkpoint import first_line
from .runtime.requests.tokenise import tokenise

Message: TypeAlias = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` in OpenAI's form; content is text or a list of ``{"type": "text"}`` parts."""


def chat_prompts(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    max_model_len: int,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """A prompt for each conversation, with its text and its token ids.

    The template writes the special tokens, so the tokenizer adds none.

    Args:
        tokenizer: whose template it is.
        messages: a conversation, or a list of them.
        max_model_len: what is longer is not tokenised to its end.
        chat_template: in place of the tokenizer's.
        add_generation_prompt: end where the answer begins.
        continue_final_message: end within the last message, for the model to go on with.
        tools: functions that the model may call, as JSON schemas.
        chat_template_kwargs: further variables of the template.

    Raises:
        ValueError: there is no template, or it refuses a conversation; options or messages do not fit.
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt=True and continue_final_message=True exclude each other; pass "
            "add_generation_prompt=False to go on with the last message"
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; pass chat_template=, or a text to generate")
    prompts = []
    for index, conversation in enumerate(_conversations(messages)):
        plain = [_plain(message, f"messages[{index}][{i}]") for i, message in enumerate(conversation)]
        try:
            text = tokenizer.apply_chat_template(
                plain,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
        except Exception as error:
            raise ValueError(
                f"messages[{index}]: the chat template refuses them: {type(error).__name__}: {first_line(error)}"
            ) from error
        token_ids = tokenise(str(text), tokenizer, max_model_len, add_special_tokens=False)
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts


def _conversations(messages: Any) -> list[Sequence[Message]]:
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes) and messages:
        found = [messages] if isinstance(messages[0], Mapping) else list(messages)
        if all(isinstance(entry, Sequence) and not isinstance(entry, str | bytes) and entry for entry in found):
            return found
    raise ValueError(
        f"messages={messages!r} is no conversation; use [{{'role': 'user', 'content': 'Hello'}}], or a list of such"
    )


def _plain(message: Any, name: str) -> dict[str, Any]:
    """The message as templates expect it: content as text, arguments of tool calls as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name}={message!r} is no message; use {{'role': 'user', 'content': 'Hello'}}")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list | tuple):
        for part in content:
            if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise ValueError(
                    f"{name} has the part {part!r}, which is not served; leave parts of type 'text' only"
                )
        plain["content"] = "\n".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{name}['content']={content!r} is not text; use a string")
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call, name) for call in plain["tool_calls"]]
    return plain


def _with_object(call: Any, name: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise ValueError(
            f"{name} calls a tool with arguments={function['arguments']!r}, which is no JSON; give an object"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}
