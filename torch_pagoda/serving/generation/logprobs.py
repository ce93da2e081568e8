"""Log-probabilities in OpenAI's two forms, and prompts' in vLLM's."""

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
"""For minus infinity, which JSON has no word for, what is not a number, and all that is below; as vLLM has it."""


class PromptLogprob(Struct):
    """A token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, by token ids; null for the first."""


class CompletionLogprobs(Struct):
    """Lists with an entry for each token; the first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Ids


class ChatToken(Struct):
    """A token by itself."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChatTokenLogprob(ChatToken):
    """A token that was chosen, and the likeliest ones."""

    top_logprobs: list[ChatToken]


class TokenTexts:
    """Texts and bytes of tokens.

    Args:
        tokenizer: a HuggingFace tokenizer.
        as_ids: texts are ``"token_id:ID"``.
    """

    def __init__(self, tokenizer: Any, as_ids: bool = False) -> None:
        self._known = None if tokenizer is None else token_bytes(tokenizer)
        self._as_ids = as_ids

    def text(self, token: TokenLogprob) -> str:
        """Text that a token added to the answer, where that is known, or its text by itself."""
        return f"token_id:{token.token_id}" if self._as_ids else _text(token)

    def bytes(self, token: TokenLogprob) -> bytes:
        """Bytes of that text; of a part of a character the token's own."""
        own = None if self._known is None else self._known.of(token.token_id)
        if own is None or _is_text(own):
            return _text(token).lstrip(_REPLACEMENT).encode(errors="replace")
        return own

    def name(self, token: TokenLogprob) -> str:
        """Text of a token by itself; a part of a character is written as by OpenAI, ``bytes:\\xf0\\x9f``."""
        text = self.text(token)
        if _REPLACEMENT not in text or _is_text(own := self.bytes(token)):
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def chat_logprobs(entries: Sequence[Sequence[TokenLogprob]], count: int, texts: TokenTexts) -> list[ChatTokenLogprob]:
    """``choices[].logprobs.content``: a token each, with its ``count`` likeliest ones.

    Texts and bytes of the tokens, one after the other, are those of the answer. A token without any text in it, such
    as the end, has its name and no bytes; among the likeliest ones, the bytes of its name.
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
    """``choices[].logprobs`` of ``/v1/completions``; a token's likeliest ones include the token itself.

    Args:
        entries: a token each; None for a prompt's first, before which there is nothing.
        count: most likely ones.
        texts: of tokens.
        offset: characters of the text before the first token.
        echoed: what the first of them, those of the prompt, are of the text.
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
    """What each token is of the text; arguments as for ``completion_logprobs``."""
    new = [entry[0] for entry in entries[len(echoed) :] if entry is not None]
    before = echoed or [""] * (len(entries) - len(new))
    return [*before, *map(_text, new)]


def prompt_logprobs(entries: Sequence[Sequence[TokenLogprob] | None]) -> PromptLogprobs:
    """``choices[].prompt_logprobs`` as vLLM has it: token id → its log-probability, rank and text."""
    return [
        None
        if entry is None
        else {str(token.token_id): PromptLogprob(_finite(token.logprob), token.rank, token.text) for token in entry}
        for entry in entries
    ]


def _by_name(chosen: TokenLogprob, likely: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, float]:
    """Text → log-probability of the chosen token and of likely ones; one whose text is taken goes by its id."""
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
    """They are whole characters, none of them U+FFFD, which stands for what is none."""
    try:
        return _REPLACEMENT not in text.decode()
    except UnicodeDecodeError:
        return False
