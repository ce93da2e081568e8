"""Prompts of requests as token ids: chat templates, tokenization, context length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ...runtime.requests.checks import shown
from ...runtime.requests.conversation import ConversationError, Message, TemplateRefusal, render_conversation
from ...runtime.requests.tokenize import cut_above, tokenize
from ..http.errors import ApiError, refuse
from .prompt_texts import prompt_texts

INLINE_CHARACTERS = 32 * 1024
"""Maximum characters tokenized on the event loop; longer texts go to a thread, so that no stream waits."""

PREPARE_SECONDS = 20.0
"""Seconds until a long prompt that is not yet rendered or tokenized is given up."""

RENDERED_PER_SENT = 4
"""Maximum characters that a template may write per character sent (plus ``INLINE_CHARACTERS``)."""

TEMPLATE_CHARACTERS = 64 * 1024
"""Maximum characters of a request's template; those of models have up to 20,000."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Prompt:
    """A validated prompt.

    Attributes:
        token_ids: at least one, all within the vocabulary.
        text: None if the client sent token ids.
    """

    token_ids: list[int]
    text: str | None


class Prompts:
    """Converts prompts of clients to token ids; has a thread for long ones, and one for templates of requests.

    Args:
        tokenizer: a HuggingFace tokenizer; None: accept token ids only, no conversations.
        chat_template: Jinja text that replaces the tokenizer's.
        chat_template_kwargs: default variables of templates.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._thread = ThreadPoolExecutor(1, "tokenize")
        self._template_thread = ThreadPoolExecutor(1, "template")  # one that loops keeps nobody else waiting

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._template_thread.shutdown(wait=False, cancel_futures=True)

    @property
    def has_template(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._chat_template or getattr(self.tokenizer, "chat_template", None))

    async def of_field(
        self,
        value: Any,
        most: int,
        max_model_len: int,
        vocab_size: int,
        add_special_tokens: bool = True,
        *,
        ends: bool = False,
    ) -> list[Prompt]:
        """The prompts of OpenAI's field ``prompt``: a text, a list of texts, token ids, or a list of such lists.

        ``ends``: as for ``tokens``.

        Raises:
            ApiError: 400.
        """
        entries = _entries(value)
        if len(entries) > most:
            refuse("prompt", f"prompt has {len(entries)} entries; the limit is {most}; send several requests")
        prompts = []
        total = sum(len(entry) for entry in entries if isinstance(entry, str))
        for i, entry in enumerate(entries):
            name = f"prompt[{i}]" if entries is value else "prompt"
            if isinstance(entry, str):
                token_ids = await self.tokens(entry, max_model_len, add_special_tokens, name, beside=total, ends=ends)
                prompts.append(Prompt(token_ids, entry))
            else:
                prompts.append(Prompt(checked_ids(entry, vocab_size, name), None))
        return prompts

    async def of_messages(
        self,
        messages: Sequence[Message],
        max_model_len: int,
        name: str = "messages",
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        ends: bool = False,
        **options: Any,
    ) -> Prompt:
        """The prompt of a conversation; ``ends`` as for ``tokens``, the others as for ``render_conversation``.

        Raises:
            ApiError: 400; the conversation or the template is invalid.
        """
        variables = {**self._chat_template_kwargs, **(chat_template_kwargs or {})}
        template = chat_template or self._chat_template
        if self.tokenizer is None or not (template or self.has_template):
            refuse(
                name, "this model has no chat template; use /v1/completions, or start the server with --chat-template"
            )
        sent = sum(map(_characters, (messages, variables, options.get("tools"), options.get("documents"))))

        def render() -> str:
            return render_conversation(
                self.tokenizer, messages, name, chat_template=template, chat_template_kwargs=variables, **options
            )

        most = RENDERED_PER_SENT * (sent + len(chat_template or "")) + INLINE_CHARACTERS
        if len(chat_template or "") > TEMPLATE_CHARACTERS:
            refuse(
                "chat_template", f"chat_template is longer than {TEMPLATE_CHARACTERS} characters; send a shorter one"
            )
        try:
            if chat_template:
                text = await self._within_time(self._template_thread, render)
            else:
                text = await self._run(render, sent)
        except ConversationError as error:
            if chat_template and isinstance(error, TemplateRefusal):
                refuse("chat_template", f"chat_template failed: {error.reason}")
            raise ApiError(400, "invalid_value", str(error), param=error.field) from error
        if len(text) > most:
            refuse(name, f"the rendered chat prompt is too long ({len(text)} characters); send fewer {name}")
        return Prompt(await self.tokens(text, max_model_len, add_special_tokens, name, ends=ends), text)

    async def tokens(
        self,
        text: str,
        max_model_len: int,
        add_special_tokens: bool,
        name: str,
        *,
        beside: int = 0,
        ends: bool = False,
    ) -> list[int]:
        """Tokenize a text, truncated if it is far longer than the context.

        Args:
            text: the text.
            max_model_len: the context length.
            add_special_tokens: add the tokenizer's special tokens.
            name: of the field, for errors.
            beside: characters of all texts of the request, which together must not block the event loop.
            ends: truncation keeps the last tokens instead of the first.

        Raises:
            ApiError: 400; there is no tokenizer, or the text has no tokens.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            refuse(name, f"{name} is text and the model has no tokenizer; send token ids")

        def encode() -> list[int]:
            return tokenize(text, tokenizer, max_model_len, ends=ends, add_special_tokens=add_special_tokens)

        token_ids = await self._run(encode, max(len(text), beside))
        if not token_ids:
            refuse(name, f"{name}={shown(text)} has no tokens; send a text that is not empty")
        return token_ids

    async def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special ones included."""

        def decode() -> str:
            return str(self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

        return await self._run(decode, 4 * len(token_ids))

    async def added_texts(self, prompt: Prompt) -> list[str]:
        """The text of each token of a prompt; see ``prompt_texts``."""
        work = partial(prompt_texts, self.tokenizer, prompt.token_ids, prompt.text)
        return await self._run(work, 40 * len(prompt.token_ids))

    async def _run(self, work: Callable[[], _T], characters: int) -> _T:
        return work() if characters <= INLINE_CHARACTERS else await self._within_time(self._thread, work)

    @staticmethod
    async def _within_time(thread: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
        try:
            running = asyncio.get_running_loop().run_in_executor(thread, work)
            return await asyncio.wait_for(running, timeout=PREPARE_SECONDS)
        except TimeoutError:
            text = f"Preparing the prompt took more than {PREPARE_SECONDS:g} s; send a shorter one."
            raise ApiError(504, "deadline_exceeded", text) from None


def checked_ids(value: Any, vocab_size: int, name: str) -> list[int]:
    """Token ids.

    Raises:
        ApiError: 400; not a list of integers within the vocabulary, or empty.
    """
    if not isinstance(value, list) or not value:
        refuse(name, f"{name}={shown(value)} is not a prompt; send text, or a nonempty list of token ids")
    if set(map(type, value)) != {int}:
        wrong = next(entry for entry in value if type(entry) is not int)
        refuse(name, f"{name} holds {shown(wrong)}; send integer token ids")
    low, high = min(value), max(value)
    if low < 0 or high >= vocab_size:
        wrong_id = low if low < 0 else high
        refuse(name, f"{name} holds {shown(wrong_id)}; use token ids in [0, {vocab_size})")
    return value


def check_counted(token_ids: list[int], max_model_len: int, param: str) -> None:
    """Refuse to count the tokens of a truncated prompt.

    Raises:
        ApiError: 400; more than twice the context length.
    """
    if len(token_ids) > cut_above(max_model_len):
        most = cut_above(max_model_len)
        refuse(param, f"{param} has more than {most} tokens, twice the context length; send it in parts")


def truncated(prompt: Prompt, most: int | None, max_model_len: int) -> Prompt:
    """The last ``most`` tokens of a prompt; None: all, -1: the context length."""
    if most is None:
        return prompt
    if most == 0:
        refuse("truncate_prompt_tokens", "truncate_prompt_tokens=0 leaves no tokens; use -1 for the context length")
    most = max_model_len - 1 if most == -1 else most
    return prompt if len(prompt.token_ids) <= most else Prompt(prompt.token_ids[-most:], None)


def check_room(prompt: Prompt, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Refuse a prompt that exceeds the context; clients recognize the first sentence.

    Args:
        prompt: the prompt.
        max_tokens: requested tokens; None: as many as fit, at least one.
        max_model_len: the context length.
        param: name of the prompt's field.

    Raises:
        ApiError: 400 ``context_length_exceeded``.
    """
    count = len(prompt.token_ids)
    wanted = 1 if max_tokens is None else max_tokens
    if count + wanted <= max_model_len:
        return
    about = f"at least {count} tokens" if count > cut_above(max_model_len) else f"{count} tokens"
    raise ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {about} and "
        f"{wanted} more are requested. Please shorten the prompt, or request fewer tokens.",
        param=param,
    )


def _entries(value: Any) -> list[Any]:
    """The entries of ``prompt``; ``value`` itself if it is a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        refuse("prompt", f"prompt={shown(value)} is not a prompt; send text, a list of texts, or token ids")
    if isinstance(value[0], str | list):
        kind = type(value[0])
        if any(type(entry) is not kind for entry in value):
            refuse("prompt", "prompt mixes texts and token ids; send a list of one kind")
        return value
    return [value]


def _characters(value: Any) -> int:
    """Characters of all texts in a JSON value, plus one for every other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _characters(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return sum(_characters(inner) for inner in value)
    return 1
