"""Log-probabilities in OpenAI's two forms, and prompt log-probabilities in vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import replace

from ...runtime.token_bytes import token_bytes
from ..engine_process.wire import TokenLogprob
from .usage import Ids

_REPLACEMENT = "\ufffd"
LOWEST = -9999.0
"""Stands for minus infinity, NaN and anything lower, as in vLLM: JSON has no infinities."""


class PromptLogprob(Struct):
    """A token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""One entry per token, by token ids; null for the first."""


class CompletionLogprobs(Struct):
    """Lists with one entry per token; the first prompt token has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Ids


class ChatToken(Struct):
    """One token."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChatTokenLogprob(ChatToken):
    """The chosen token, and the most likely ones."""

    top_logprobs: list[ChatToken]


class TokenTexts:
    """Texts and bytes of tokens.

    Args:
        tokenizer: a HuggingFace tokenizer.
        as_ids: write texts as ``"token_id:ID"``.
    """

    def __init__(self, tokenizer: Any, as_ids: bool = False) -> None:
        self._known = None if tokenizer is None else token_bytes(tokenizer)
        self._as_ids = as_ids

    def text(self, token: TokenLogprob) -> str:
        """Text that a token added to the output, if known, else its text by itself."""
        return f"token_id:{token.token_id}" if self._as_ids else _text(token)

    def bytes(self, token: TokenLogprob) -> bytes:
        """Bytes of that text; for part of a character, the token's own."""
        own = None if self._known is None else self._known.of(token.token_id)
        if own is None or _is_text(own):
            return _text(token).lstrip(_REPLACEMENT).encode(errors="replace")
        return own

    def name(self, token: TokenLogprob) -> str:
        """Text of a token by itself; part of a character is written like OpenAI's, ``bytes:\\xf0\\x9f``."""
        text = self.text(token)
        if _REPLACEMENT not in text or _is_text(own := self.bytes(token)):
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def chat_logprobs(entries: Sequence[Sequence[TokenLogprob]], count: int, texts: TokenTexts) -> list[ChatTokenLogprob]:
    """``choices[].logprobs.content``: one entry per token, with its ``count`` most likely ones.

    The texts, and bytes, of the tokens join to those of the output. A token without text, such as the end token, has
    its name and no bytes; among the most likely ones, the bytes of its name.
    """
    return [
        ChatTokenLogprob(
            *_chat_token(entry[0], texts),
            [
                ChatToken(*_chat_token(token if token.added else replace(token, added=None), texts))
                for token in _likeliest(entry, count)
            ],
        )
        for entry in entries
    ]


def completion_logprobs(
    entries: Sequence[Sequence[TokenLogprob] | None],
    count: int,
    texts: TokenTexts,
    offset: int,
    echoed: Sequence[str] = (),
    first: int = 0,
) -> CompletionLogprobs:
    """``choices[].logprobs`` of ``/v1/completions``; the most likely tokens include the token itself.

    Args:
        entries: one per token; None for a prompt's first.
        count: number of most likely tokens.
        texts: texts of tokens.
        offset: characters of the text before the first token.
        echoed: texts of the leading tokens, those of the prompt.
        first: id of a prompt's first token.
    """
    result = CompletionLogprobs([], [], [], [])
    for entry, text in zip(entries, added_texts(entries, echoed), strict=True):
        chosen = TokenLogprob(first, 0.0, 0, added=text) if entry is None else replace(entry[0], added=text)
        result.tokens.append(texts.text(chosen))
        result.token_logprobs.append(None if entry is None else _finite(chosen.logprob))
        result.top_logprobs.append(_by_name(chosen, _likeliest(entry, count), texts) if entry and count else None)
        result.text_offset.append(offset)
        offset += len(text)
    return result


def added_texts(entries: Sequence[Sequence[TokenLogprob] | None], echoed: Sequence[str] = ()) -> list[str]:
    """The text of each token; arguments as for ``completion_logprobs``."""
    new = [entry[0] for entry in entries[len(echoed) :] if entry is not None]
    before = echoed or [""] * (len(entries) - len(new))
    return [*before, *map(_text, new)]


def prompt_logprobs(entries: Sequence[Sequence[TokenLogprob] | None]) -> PromptLogprobs:
    """``choices[].prompt_logprobs`` as in vLLM: token id → its log-probability, rank and text."""
    return [
        None
        if entry is None
        else {str(token.token_id): PromptLogprob(_finite(token.logprob), token.rank, token.text) for token in entry}
        for entry in entries
    ]


def _by_name(chosen: TokenLogprob, likely: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, float]:
    """Text → log-probability of the chosen token and the most likely ones; a duplicate text is replaced by the id."""
    found = {texts.text(chosen): _finite(chosen.logprob)}
    for token in likely:
        if token.token_id != chosen.token_id:
            name = texts.name(token)
            found[f"token_id:{token.token_id}" if name in found else name] = _finite(token.logprob)
    return found


def _chat_token(token: TokenLogprob, texts: TokenTexts) -> tuple[str, float, list[int]]:
    """Fields of a ``ChatToken``."""
    found = texts.bytes(token)
    name = texts.text(token if found or token.added is None else replace(token, added=None))
    return name, _finite(token.logprob), list(found)


def _text(token: TokenLogprob) -> str:
    return token.text if token.added is None else token.added


def _likeliest(entry: Sequence[TokenLogprob], count: int) -> list[TokenLogprob]:
    return sorted((token for token in entry if token.rank <= count), key=lambda token: token.rank)


def _finite(logprob: float) -> float:
    return logprob if LOWEST < logprob < math.inf else LOWEST


def _is_text(text: bytes) -> bool:
    """Whether the bytes are complete characters, none of them U+FFFD, which stands for invalid bytes."""
    try:
        return _REPLACEMENT not in text.decode()
    except UnicodeDecodeError:
        return False
