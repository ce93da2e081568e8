"""Conversations as prompts: the tokenizer's chat template, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .runtime.requests.conversation import Message, render_conversation
from .runtime.requests.tokenize import tokenize


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
    """One prompt per conversation, with its text and its token ids.

    The template writes the special tokens, so the tokenizer adds none.

    Args:
        tokenizer: provides the chat template.
        messages: a conversation, or a list of them.
        max_model_len: a longer prompt is tokenized only in part.
        chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs: as for
            ``render_conversation``.

    Raises:
        ValueError: there is no template, or it rejects a conversation; options or messages are invalid.
    """
    prompts = []
    for index, conversation in enumerate(_conversations(messages)):
        text = render_conversation(
            tokenizer,
            conversation,
            f"messages[{index}]",
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        token_ids = tokenize(text, tokenizer, max_model_len, add_special_tokens=False)
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts


def _conversations(messages: Any) -> list[Sequence[Message]]:
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes) and messages:
        found = [messages] if isinstance(messages[0], Mapping) else list(messages)
        if all(isinstance(entry, Sequence) and not isinstance(entry, str | bytes) and entry for entry in found):
            return found
    raise ValueError(
        f"messages={messages!r} is not a conversation; use [{{'role': 'user', 'content': 'Hello'}}], or "
        "a list of such"
    )
