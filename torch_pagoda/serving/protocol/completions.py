"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Literal, TypeVar

from fastapi import APIRouter
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypeAliasType

from ..engine_process.wire import TokenLogprob
from ..generation.choices import Choice
from ..generation.front import Front, key_name
from ..generation.generate import Ask, Generation, Piece, StopReason
from ..generation.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    added_texts,
    completion_logprobs,
    prompt_logprobs,
)
from ..generation.prompts import Prompt, check_room, truncated
from ..generation.usage import Count, Ids, Usage, UsageSoFar
from ..http.errors import Error, refuse
from .answers import Answer, Generated
from .fields import CompletionBody
from .generation_route import Prepared, respond
from .openapi import documented
from .sampling import request_options, sampling_params

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class CompletionChunkChoice(Struct, kw_only=True):
    """A piece of a text."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: StopReason = None
    token_ids: Ids | UnsetType = UNSET
    prompt_token_ids: Ids | UnsetType = UNSET


class CompletionChoice(CompletionChunkChoice, kw_only=True):
    """A text."""

    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(Generated, kw_only=True):
    """Response of ``POST /v1/completions``."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Generated, kw_only=True):
    """Event of ``POST /v1/completions``; the event with the usage has no choices."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]
    usage: UsageSoFar | UnsetType | None = UNSET


CompletionEvents = TypeAliasType("CompletionEvents", CompletionChunk | Error)


def completions_router(front: Front) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        **documented(
            CompletionBody,
            "Continue one or more prompts.",
            answer=Completion,
            events=CompletionEvents,
        ),
    )
    async def completions(request: Request) -> Response:
        return await respond(front, request, CompletionBody, prepare)

    return router


async def prepare(front: Front, request: Request, body: CompletionBody, model: str) -> Prepared:
    """Convert the request to a generation.

    Raises:
        ApiError: 400.
    """
    hello, settings = front.client.hello, front.settings
    best_of = None if body.best_of == (body.n or 1) else body.best_of
    if best_of is not None and body.stream:
        refuse(
            "best_of", f"best_of={best_of} cannot be streamed unless it equals n; leave out stream, or use best_of=n"
        )
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = hello.default_params.get("max_tokens", DEFAULT_MAX_TOKENS)
    if max_tokens == 0 and not body.echo:
        refuse("max_tokens", "max_tokens=0 needs echo=true; use at least 1")
    scores = body.logprobs if body.echo else None
    params = sampling_params(
        body,
        hello.default_params,
        settings,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        best_of=best_of,
        prompt_logprobs=scores if body.prompt_logprobs is None else max(body.prompt_logprobs, scores or 0),
    )
    prompts = await front.prompts.of_field(
        body.prompt,
        settings.max_prompts,
        hello.max_model_len,
        hello.vocab_size,
        body.add_special_tokens is not False,
        ends=body.truncate_prompt_tokens is not None,
    )
    prompts = [truncated(prompt, body.truncate_prompt_tokens, hello.max_model_len) for prompt in prompts]
    for prompt in prompts:
        check_room(prompt, body.max_tokens, hello.max_model_len, "prompt")
    echoes = None
    if body.echo:
        echoes = [await _echo(front, prompt, body.logprobs is not None) for prompt in prompts]
    ask = Ask(
        front.new_id("cmpl"),
        request.scope["state"]["request_id"],
        prompts,
        params,
        request_options(body, settings, key_name(request.scope)),
        bool(body.stream),
    )
    return Prepared(ask, lambda generation: CompletionAnswer(generation, body, model, echoes))


async def _echo(front: Front, prompt: Prompt, by_token: bool) -> list[str]:
    """Text of a prompt; with ``by_token``, the text of each of its tokens."""
    if by_token and front.tokenizer is not None:
        return await front.prompts.added_texts(prompt)
    return [await front.prompts.decode(prompt.token_ids) if prompt.text is None else prompt.text]


_Kind = TypeVar("_Kind", bound=CompletionChunkChoice)


class CompletionAnswer(Answer):
    """The response, whole or as events.

    Args:
        generation, body, model: see ``Answer``.
        echoes: parts of each prompt that the output begins with: with ``logprobs``, one per token.
    """

    kind, chunk_kind = Completion, CompletionChunk

    def __init__(
        self, generation: Generation, body: CompletionBody, model: str, echoes: list[list[str]] | None
    ) -> None:
        super().__init__(generation, body, model)
        self._count = body.logprobs
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._echoes = echoes
        self._offsets: dict[int, int] = {}
        self.is_plain = self.is_plain and self._count is None

    def events(self, pieces: list[Piece]) -> bytes:
        """Events of new pieces."""
        return b"".join([self._event(piece) for piece in pieces])

    def body(self) -> Completion:
        """The response as one object."""
        choices = [self._choice(CompletionChoice, i, choice) for i, choice in enumerate(self.choices.by_index)]
        if self._wants_prompt_logprobs:
            for choice in choices:
                scored = self.generation.prompt_logprobs[choice.index // self.generation.ask.n]
                choice.prompt_logprobs = None if scored is None else prompt_logprobs(scored)
        return self.whole(choices)

    def _event(self, piece: Piece) -> bytes:
        is_first = piece.choice not in self._offsets
        if self.is_plain and piece.finish_reason is None and not (is_first and self._echoes is not None):
            self._offsets[piece.choice] = 0
            if not piece.text:
                return b""
            return self.text_chunk(
                piece.choice, piece.text, lambda text: CompletionChunkChoice(index=piece.choice, text=text)
            )
        return self.chunk([self._choice(CompletionChunkChoice, piece.choice, piece)])

    def _choice(self, kind: type[_Kind], index: int, part: Choice | Piece) -> _Kind:
        """A choice, or a part of it."""
        prompt = index // self.generation.ask.n
        is_first = index not in self._offsets
        offset = self._offsets.get(index, 0)
        text = part.text
        entries: list[list[TokenLogprob] | None] = list(part.logprobs or ())
        echoed: list[str] = []
        scored = self.generation.prompt_logprobs[prompt]
        if is_first and self._echoes is not None:
            before = "".join(self._echoes[prompt])
            text = before + text
            if scored is not None:
                entries, echoed = [*scored, *entries], self._echoes[prompt]
            else:
                offset = len(before)
        reason = part.finish_reason
        assert reason != "tool_calls"
        choice = kind(index=index, text=text, finish_reason=reason, stop_reason=part.stop_reason)
        if self._count is not None:
            first = self.generation.ask.prompts[prompt].token_ids[0] if echoed else 0
            choice.logprobs = completion_logprobs(entries, self._count, self.texts, offset, echoed, first)
            # By the texts of tokens, as in a whole answer: what may begin a stop string is held back.
            offset += sum(map(len, added_texts(entries, echoed)))
        self._offsets[index] = offset
        if self.asked.return_token_ids:
            choice.token_ids = part.token_ids
            if is_first:
                choice.prompt_token_ids = self.generation.ask.prompts[prompt].token_ids
        return choice
