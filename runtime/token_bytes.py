"""Bytes that single tokens stand for, read from the pieces of a vocabulary as the tokenizer's decoder reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of each token of a fast HuggingFace tokenizer.

    Args:
        tokenizer: its decoder is byte-level (GPT-2, Qwen, Llama 3), or replaces a mark by a space and may have
            tokens of single bytes (Metaspace: Llama 2, Mistral, Gemma).

    Attributes:
        covers_all_text: there is a token for each byte, so that the tokens can spell any text.

    Raises:
        ValueError: it is another tokenizer, whose tokens have no text without those around them.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "id_to_token"):
            raise ValueError("it is not a fast tokenizer")
        self._piece_of = backend.id_to_token
        self._replacements: list[tuple[str, str]] = []
        self._has_letters = self._has_byte_pieces = False
        for step in _steps(backend.decoder):
            self._add(step)
        if not self._has_letters and not self._replacements:
            raise ValueError("its decoder joins words")
        self.covers_all_text = self._has_letters or self._has_byte_pieces

    def of(self, token: int) -> bytes | None:
        """Bytes of a token, those of its name if it is special; None if there is no such token."""
        piece = self._piece_of(token)
        return None if piece is None else self._read(piece)

    def _add(self, step: dict[str, Any]) -> None:
        kind, pattern = step["type"], step.get("pattern")
        if kind == "ByteLevel":
            self._has_letters = True
        elif kind == "ByteFallback":
            self._has_byte_pieces = True
        elif kind == "Metaspace":
            self._replacements.append((step["replacement"], " "))
        elif kind == "Replace" and isinstance(pattern, dict) and "String" in pattern:
            self._replacements.append((pattern["String"], step["content"]))
        elif kind not in ("Fuse", "Strip"):  # what is stripped is the beginning or the end of the whole text
            raise ValueError(f"its decoder has a {kind}")

    def _read(self, piece: str) -> bytes:
        if self._has_byte_pieces and (found := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        for mark, text in self._replacements:
            piece = piece.replace(mark, text)
        if self._has_letters:
            try:
                return bytes([_LETTERS[letter] for letter in piece])
            except KeyError:  # an added token, written as it is
                pass
        return piece.encode(errors="replace")


_known: WeakKeyDictionary[Any, TokenBytes | None] = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The ``TokenBytes`` of a tokenizer, made once; None where its tokens have no bytes of their own."""
    if tokenizer not in _known:
        try:
            _known[tokenizer] = TokenBytes(tokenizer)
        except ValueError:
            _known[tokenizer] = None
    return _known[tokenizer]


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """The steps of a decoder of ``tokenizers``, one after the other."""
    pending = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            yield step


def _byte_letters() -> dict[str, int]:
    """Letters by which byte-level vocabularies write bytes (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()
