"""The frame of every generation response: id, time, model, usage; and events encoded around their text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..generation.choices import Choices
from ..generation.generate import Generation, Piece
from ..generation.logprobs import TokenTexts
from ..generation.stream import DONE
from ..generation.usage import Count, UsageSoFar
from ..http.errors import ApiError, Error
from .fields import GenerationBody

_TEXT = "\x00text\x00"


def event(value: Struct) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Generated(Struct):
    """Fields that every generation response begins with."""

    id: str
    created: Count
    model: str
    system_fingerprint: str


class Answer:
    """The parts that the renderers of all kinds of responses share.

    Args:
        generation: the generation to render.
        body: the request's body.
        model: the name to answer under.

    Attributes:
        kind: struct of the whole response, a ``Generated``.
        chunk_kind: struct of its events, likewise.
    """

    kind: ClassVar[Callable[..., Any]]
    chunk_kind: ClassVar[Callable[..., Any]]

    def __init__(self, generation: Generation, body: GenerationBody, model: str) -> None:
        self.generation, self.asked = generation, body
        self.choices = Choices(generation.ask.num_choices)
        front = generation.front
        self.texts = TokenTexts(front.tokenizer, bool(body.return_tokens_as_token_ids))
        options = body.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._head = generation.ask.id, int(time.time()), model, front.settings.system_fingerprint
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self.is_plain = not (self._usage_always or body.return_token_ids)
        """Whether events of text contain the text only."""

    @property
    def done(self) -> bytes:
        """OpenAI's final event."""
        return DONE

    def failure_events(self, error: ApiError) -> bytes:
        """The error object as an event, which OpenAI's clients raise."""
        return event(error.body())

    def failure_body(self, error: ApiError, request_id: str) -> Error:
        """OpenAI's error object."""
        return error.body()

    def add(self, pieces: list[Piece]) -> None:
        """Keep pieces for the whole response."""
        self.choices.add(pieces)

    def whole(self, choices: list[Any]) -> Any:
        """The response as one object."""
        return self.kind(*self._head, choices=choices, usage=self.generation.usage())

    def chunk(self, choices: list[Any]) -> bytes:
        """An event with these choices."""
        usage: UsageSoFar | UnsetType | None = None if self._includes_usage else UNSET
        if self._usage_always:
            usage = self.generation.usage_so_far()
        return event(self.chunk_kind(*self._head, choices=choices, usage=usage))

    def text_chunk(self, index: int, text: str, make_choice: Any) -> bytes:
        """An event with a piece of text; the rest of the event is encoded once per choice.

        Args:
            index: index of the choice.
            text: the piece.
            make_choice: the choice's object for a text.
        """
        frame = self._frames.get(index)
        if frame is None:
            before, after = self.chunk([make_choice(_TEXT)]).split(msgspec.json.encode(_TEXT))
            frame = self._frames[index] = (before, after)
        return frame[0] + msgspec.json.encode(text) + frame[1]

    def last_events(self) -> bytes:
        """The event with the usage, if requested."""
        if not self._includes_usage:
            return b""
        return event(self.chunk_kind(*self._head, choices=[], usage=self.generation.usage()))
