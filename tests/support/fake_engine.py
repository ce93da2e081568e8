"""An engine client without an engine: it answers what a test tells it to, delta by delta."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_pagoda.serving.engine_process.client import (
    EngineDied,
    EngineState,
    EngineUnavailable,
    RequestRefused,
)
from torch_pagoda.serving.engine_process.wire import (
    WIRE_VERSION,
    Delta,
    Hello,
    RequestTimes,
    Submit,
    TokenLogprob,
)

WORDS = ("def", " name", "(self", ", value", "):", "\n    ", "return", " None", " ☕", "é")


@dataclass
class FakeEngine:
    """Answers every completion with ``texts`` in turn, one piece and token a delta.

    Attributes:
        tokenizer: gives the pieces their ids.
        texts: pieces that completions consist of, repeated until ``max_tokens``.
        gate: deltas wait for it, where it is given.
        refusal: with it every submission is refused.
        error: the completions end with it.
        submits: what came.
        cancelled: request ids.
    """

    tokenizer: Any
    texts: tuple[str, ...] = WORDS
    gate: asyncio.Event | None = None
    refusal: tuple[str, str] | None = None
    error: str | None = None
    finish: str = "length"
    finish_after: int | None = None
    state: EngineState = "ready"
    max_model_len: int = 512
    model: str = "fake"
    max_num_seqs: int = 4
    default_params: dict[str, Any] = field(default_factory=dict)
    stats: Mapping[str, int | float] = field(default_factory=dict)
    seconds_since_heard: float = 0.0
    submits: list[Submit] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    died: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stats_of_engines(self) -> Mapping[str, Mapping[str, int | float]]:
        return {"0": self.stats}

    @property
    def hello(self) -> Hello:
        if self.state == "loading":
            raise EngineUnavailable("loading", "the engine loads")
        return Hello(
            version=WIRE_VERSION,
            max_model_len=self.max_model_len,
            vocab_size=len(self.tokenizer),
            max_num_seqs=self.max_num_seqs,
            max_queue=None,
            default_params=self.default_params,
            model=self.model,
            device="cpu",
            stats={},
        )

    def submit(self, submit: Submit) -> FakeStream:
        if self.state != "ready":
            raise EngineUnavailable(self.state, "no engine")
        self.submits.append(submit)
        return FakeStream(self, submit)

    async def ask(self, what: str, timeout: float = 10.0) -> Any:
        self.asked.append(what)
        return None

    async def close(self) -> None:
        self.state = "dead"


class FakeStream:
    """The deltas of one submission."""

    def __init__(self, engine: FakeEngine, submit: Submit) -> None:
        self._engine, self._submit = engine, submit
        self._step = 0
        self._collected: dict[tuple[int, int], list[Delta]] = {}

    async def next(self) -> list[Delta]:
        engine, submit = self._engine, self._submit
        if engine.refusal is not None:
            raise RequestRefused(*engine.refusal)
        if engine.gate is not None:
            gate, died = asyncio.ensure_future(engine.gate.wait()), asyncio.ensure_future(engine.died.wait())
            try:
                await asyncio.wait((gate, died), return_when=asyncio.FIRST_COMPLETED)
            finally:
                gate.cancel()
                died.cancel()
        else:
            await asyncio.sleep(0)
        if engine.died.is_set():
            raise EngineDied("the engine died")
        if not submit.streams:
            self._step = engine.max_model_len  # all at once
        deltas = [
            self._delta(prompt, index)
            for prompt in range(len(submit.prompts))
            for index in range(submit.params.get("n", 1))
        ]
        self._step += 1
        return deltas

    def cancel(self) -> None:
        self._engine.cancelled.append(self._submit.request_id)

    def _delta(self, prompt: int, index: int) -> Delta:
        engine, submit = self._engine, self._submit
        params = submit.params
        wanted = params.get("max_tokens")
        if wanted is None:
            wanted = engine.max_model_len - len(submit.prompts[prompt])
        count = min(wanted, wanted if engine.finish_after is None else engine.finish_after)
        ends = self._step + 1 >= count
        begin = 0 if not submit.streams else self._step
        end = min(self._step + 1, count)
        pieces = [engine.texts[i % len(engine.texts)] for i in range(begin, end)]
        ids = [engine.tokenizer(piece, add_special_tokens=False).input_ids[0] for piece in pieces]
        delta = Delta(submit.request_id, prompt, index, "".join(pieces), ids)
        if (top := params.get("logprobs")) is not None:
            delta.logprobs = [_logprobs(token, text, top) for token, text in zip(ids, pieces, strict=True)]
        if (
            (top := params.get("prompt_logprobs")) is not None
            and index == 0
            and (self._step == 0 or not submit.streams)
        ):
            delta.prompt_logprobs = [
                None if i == 0 else _logprobs(token, engine.tokenizer.decode([token]), top)
                for i, token in enumerate(submit.prompts[prompt])
            ]
        if ends:
            delta.finish_reason = "error" if engine.error else engine.finish
            delta.error = engine.error
            delta.num_cached_tokens = 2
            delta.times = RequestTimes(0.001, 0.002, 0.003, count, 0)
        return delta


def _logprobs(token: int, text: str, top: int) -> list[TokenLogprob]:
    others = [TokenLogprob(token + i, -1.0 - i, i + 1, f"other{i}") for i in range(1, top)]
    return [TokenLogprob(token, -0.5, 1, text), *others]
