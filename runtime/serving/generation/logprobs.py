"""Log-probabilities in OpenAI's two forms, and prompts' in vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..engine_process.wire import TokenLogprob

LOWEST = -9999.0
"""For minus infinity, which JSON has no word for, what is not a number, and all that is below; as vLLM has it."""


class TokenTexts:
    """Texts and bytes of single tokens.

    Args:
        tokenizer: a HuggingFace tokenizer.
        as_ids: texts are ``"token_id:ID"``.
    """

    def __init__(self, tokenizer: Any, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token: TokenLogprob) -> str:
        """Text of a token by itself."""
        return f"token_id:{token.token_id}" if self._as_ids else token.text

    def bytes(self, token: TokenLogprob) -> list[int]:
        """Bytes of a token, of which several may make a character."""
        if "\ufffd" in token.text and self._tokenizer is not None:
            piece = self._tokenizer.convert_ids_to_tokens(token.token_id)
            if isinstance(piece, str) and (found := _bytes_of_piece(piece)) is not None:
                return found
        return list(token.text.encode("utf-8", errors="replace"))


def chat_logprobs(entries: Sequence[Sequence[TokenLogprob]], count: int, texts: TokenTexts) -> list[dict[str, Any]]:
    """``choices[].logprobs.content``: a token each, with its ``count`` likeliest ones."""
    return [
        {
            **_chat_token(entry[0], texts),
            "top_logprobs": [_chat_token(token, texts) for token in _likeliest(entry, count)],
        }
        for entry in entries
    ]


def completion_logprobs(
    entries: Sequence[Sequence[TokenLogprob] | None], count: int, texts: TokenTexts, offset: int, first: str = ""
) -> dict[str, Any]:
    """``choices[].logprobs`` of ``/v1/completions``; a token's likeliest ones include the token itself.

    Args:
        entries: a token each; None for a prompt's first, before which there is nothing.
        count: most likely ones.
        texts: of tokens.
        offset: characters before the first token.
        first: text of a prompt's first token.
    """
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        if entry is None:
            for name, value in (("tokens", first), ("token_logprobs", None), ("top_logprobs", None)):
                result[name].append(value)
            result["text_offset"].append(offset)
            offset += len(first)
            continue
        chosen = entry[0]
        shown = {texts.text(token): _finite(token.logprob) for token in [*_likeliest(entry, count), chosen]}
        result["tokens"].append(texts.text(chosen))
        result["token_logprobs"].append(_finite(chosen.logprob))
        result["top_logprobs"].append(shown if count else None)
        result["text_offset"].append(offset)
        offset += len(chosen.text)
    return result


def prompt_logprobs(entries: Sequence[Sequence[TokenLogprob] | None]) -> list[dict[str, Any] | None]:
    """``choices[].prompt_logprobs`` as vLLM has it: token id → its log-probability, rank and text."""
    return [
        None
        if entry is None
        else {
            str(token.token_id): {
                "logprob": _finite(token.logprob),
                "rank": token.rank,
                "decoded_token": token.text,
            }
            for token in entry
        }
        for entry in entries
    ]


def _chat_token(token: TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _finite(token.logprob), "bytes": texts.bytes(token)}


def _likeliest(entry: Sequence[TokenLogprob], count: int) -> list[TokenLogprob]:
    return sorted((token for token in entry if token.rank <= count), key=lambda token: token.rank)


def _finite(logprob: float) -> float:
    return logprob if LOWEST < logprob < math.inf else LOWEST


def _byte_letters() -> dict[str, int]:
    """Letters by which byte-level vocabularies write bytes (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _bytes_of_piece(piece: str) -> list[int] | None:
    """Bytes of a vocabulary's entry for a part of a character; None where it is not written in a known way."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return [int(piece[3:5], 16)]
        except ValueError:
            return None
    if all(letter in _LETTERS for letter in piece):
        return [_LETTERS[letter] for letter in piece]
    return None
