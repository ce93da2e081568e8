"""The frame of every answer with text: id, time, model, usage, and events of which only the text is encoded."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ..generation.choices import Choices
from ..generation.generate import Generation, Piece
from ..generation.logprobs import TokenTexts
from ..generation.stream import DONE
from ..http.errors import ApiError
from .fields import GenerationBody

_TEXT = "\x00text\x00"


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Answer:
    """What the renderers of both kinds of answers share.

    Args:
        generation: whose pieces are shown.
        body: what was asked.
        model: the name to answer under.
        kind: ``object`` of the whole answer.
        chunk_kind: of its events.
    """

    def __init__(self, generation: Generation, body: GenerationBody, model: str, kind: str, chunk_kind: str) -> None:
        self.generation, self.asked = generation, body
        self.choices = Choices(generation.ask.num_choices)
        front = generation.front
        self.texts = TokenTexts(front.tokenizer, bool(body.return_tokens_as_token_ids))
        options = body.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._kind, self._chunk_kind = kind, chunk_kind
        self._head = {
            "id": generation.ask.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": front.settings.system_fingerprint,
        }
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self.is_plain = not (self._usage_always or body.return_token_ids)
        """Events of text have nothing but the text in them."""

    @property
    def done(self) -> bytes:
        """OpenAI's."""
        return DONE

    def failure_events(self, error: ApiError) -> bytes:
        """The error object as an event, which OpenAI's clients raise."""
        return event(error.body())

    def failure_body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """OpenAI's error object."""
        return error.body()

    def add(self, pieces: list[Piece]) -> None:
        """Keep pieces for the whole answer."""
        self.choices.add(pieces)

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer as one object."""
        return {**self._head, "object": self._kind, "choices": choices, "usage": self.generation.usage()}

    def chunk(self, choices: list[dict[str, Any]]) -> bytes:
        """An event with these choices."""
        return event(self._chunk(choices))

    def text_chunk(self, index: int, text: str, make_choice: Any) -> bytes:
        """An event with a piece of text; what is around it is encoded once for each choice.

        Args:
            index: of the choice.
            text: the piece.
            make_choice: the choice's object for a text.
        """
        frame = self._frames.get(index)
        if frame is None:
            before, after = self.chunk([make_choice(_TEXT)]).split(msgspec.json.encode(_TEXT))
            frame = self._frames[index] = (before, after)
        return frame[0] + msgspec.json.encode(text) + frame[1]

    def last_events(self) -> bytes:
        """The event with the usage, where it is asked for."""
        if not self._includes_usage:
            return b""
        return event({**self._chunk([]), "usage": self.generation.usage()})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self._chunk_kind, "choices": choices}
        if self._usage_always:
            chunk["usage"] = self.generation.usage(final=False)
        elif self._includes_usage:
            chunk["usage"] = None
        return chunk
