"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..engine_process.wire import TokenLogprob
from ..generation.front import Front, key_name
from ..generation.generate import Ask, Generation, Piece
from ..generation.logprobs import added_texts, completion_logprobs, prompt_logprobs
from ..generation.prompts import Prompt, check_room, truncated
from ..http.errors import refuse
from .answer_schemas import Completion, CompletionEvents
from .answers import Answer
from .fields import CompletionBody
from .generation_route import Prepared, respond
from .openapi import documented
from .sampling import request_options, sampling_params

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def completions_router(front: Front) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post(
        "/v1/completions",
        **documented(
            CompletionBody,
            "Text that follows on a prompt, or on several.",
            answer=Completion,
            events=CompletionEvents,
        ),
    )
    async def completions(request: Request) -> Response:
        return await respond(front, request, CompletionBody, prepare)

    return router


async def prepare(front: Front, request: Request, body: CompletionBody, model: str) -> Prepared:
    """What to ask the engine.

    Raises:
        ApiError: 400.
    """
    hello, settings = front.client.hello, front.settings
    best_of = None if body.best_of == (body.n or 1) else body.best_of
    if best_of is not None and body.stream:
        refuse("best_of", f"best_of={best_of} is not n and cannot be streamed: which are best is known at the end")
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = hello.default_params.get("max_tokens", DEFAULT_MAX_TOKENS)
    if max_tokens == 0 and not body.echo:
        refuse("max_tokens", "max_tokens=0 needs echo=true; ask for at least one token")
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
    """Text of a prompt, ``by_token`` as what each of its tokens is of it."""
    if by_token and front.tokenizer is not None:
        return await front.prompts.added_texts(prompt)
    return [await front.prompts.decode(prompt.token_ids) if prompt.text is None else prompt.text]


class CompletionAnswer(Answer):
    """The answer, whole or in events.

    Args:
        generation, body, model: see ``Answer``.
        echoes: text of each prompt in parts, where the answer begins with it: with ``logprobs`` one for each token.
    """

    def __init__(
        self, generation: Generation, body: CompletionBody, model: str, echoes: list[list[str]] | None
    ) -> None:
        super().__init__(generation, body, model, "text_completion", "text_completion")
        self._count = body.logprobs
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._echoes = echoes
        self._offsets: dict[int, int] = {}
        self.is_plain = self.is_plain and self._count is None

    def events(self, pieces: list[Piece]) -> bytes:
        """Events of new pieces."""
        return b"".join([self._event(piece) for piece in pieces])

    def body(self) -> dict[str, Any]:
        """The answer as one object."""
        return self.whole(
            [
                self._choice(i, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason)
                for i, c in enumerate(self.choices.by_index)
            ]
        )

    def _event(self, piece: Piece) -> bytes:
        is_first = piece.choice not in self._offsets
        if self.is_plain and piece.finish_reason is None and not (is_first and self._echoes is not None):
            self._offsets[piece.choice] = 0
            if not piece.text:
                return b""
            return self.text_chunk(piece.choice, piece.text, lambda text: _plain_choice(piece.choice, text))
        return self.chunk(
            [
                self._choice(
                    piece.choice, piece.text, piece.token_ids, piece.logprobs, piece.finish_reason, piece.stop_reason
                )
            ]
        )

    def _choice(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        logprobs: list[list[TokenLogprob]] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        """The object of a choice, or of a part of it."""
        prompt = index // self.generation.ask.n
        is_first = index not in self._offsets
        offset = self._offsets.get(index, 0)
        entries: list[list[TokenLogprob] | None] = list(logprobs or ())
        echoed: list[str] = []
        scored = self.generation.prompt_logprobs[prompt]
        if is_first and self._echoes is not None:
            before = "".join(self._echoes[prompt])
            text = before + text
            if scored is not None:
                entries, echoed = [*scored, *entries], self._echoes[prompt]
            else:
                offset = len(before)
        choice = _plain_choice(index, text)
        if self._count is not None:
            first = self.generation.ask.prompts[prompt].token_ids[0] if echoed else 0
            choice["logprobs"] = completion_logprobs(entries, self._count, self.texts, offset, echoed, first)
            # By the texts of tokens, as in a whole answer: what may begin a stop string is held back.
            offset += sum(map(len, added_texts(entries, echoed)))
        self._offsets[index] = offset
        choice |= {"finish_reason": finish_reason, "stop_reason": stop_reason}
        if self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = None if scored is None else prompt_logprobs(scored)
        if self.asked.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = self.generation.ask.prompts[prompt].token_ids
        return choice


def _plain_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
