"""What benchmarks/soak.py asks for, how its model fails, and what is wrong with an output."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from torch_pagoda import RequestOutput, SamplingParams
from torch_pagoda.runtime.program import Program
from torch_pagoda.runtime.step_metadata import StepMetadata

VOCAB_SIZE = 2048
EOS, RAISES, GIVES_NAN = 0, 1, 2
"""The end of a text; tokens that make the model fail. Prompts that are not to fail begin with the next."""
FIRST_PLAIN = 3

MAX_MODEL_LEN = 160


class Interrupt(KeyboardInterrupt):
    """The Ctrl-C of this test."""


class FailingProgram:
    """A program that fails as soak.py says.

    Args:
        program: the real one.
        rng: draws when.
        rate: of steps that raise once, and of steps that are interrupted.
    """

    def __init__(self, program: Program, rng: random.Random, rate: float) -> None:
        self.program, self.rng, self.rate = program, rng, rate
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        tokens = input_ids[0]
        if bool((tokens == RAISES).any()):
            self.counts["raised for a token"] += 1
            raise RuntimeError("injected: this token cannot be computed")
        draw = self.rng.random()
        if draw < self.rate and len(step.seq_lens) > 1:  # alone it would be the culprit
            self.counts["raised once"] += 1
            raise RuntimeError("injected: out of memory")
        if draw > 1 - self.rate:
            self.counts["interrupted"] += 1
            raise Interrupt
        logits = self.program(input_ids, position_ids, step)
        spoilt = tokens[step.logits_rows] == GIVES_NAN
        if bool(spoilt.any()):
            self.counts["gave NaN"] += 1
            logits = logits.clone()
            logits[spoilt] = float("nan")
        return logits


@dataclass
class Asked:
    """A request on its way.

    Attributes:
        prompt: its tokens.
        params: what it asked for.
        fails: its prompt holds a token that fails.
        has_deadline: it may end with "timeout".
        cancelled: it was cancelled while unfinished, so it may end so.
    """

    prompt: list[int]
    params: SamplingParams
    fails: bool = False
    has_deadline: bool = False
    cancelled: bool = False


class Requests:
    """Draws requests."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.prefixes = [self._tokens(rng.choice((16, 32, 48, 64))) for _ in range(12)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(FIRST_PLAIN, VOCAB_SIZE) for _ in range(count)]

    def draw(self) -> tuple[Asked, dict[str, Any]]:
        """A request, and the options to submit it with."""
        rng = self.rng
        prompt = list(rng.choice(self.prefixes)) if rng.random() < 0.5 else []
        prompt += self._tokens(rng.randint(1, 48))
        fails = rng.random() < 0.002
        if fails:
            prompt.append(rng.choice((RAISES, GIVES_NAN)))
        options: dict[str, Any] = {"priority": rng.randint(-1, 3), "client": rng.choice("abc")}
        has_deadline = rng.random() < 0.05
        if has_deadline:
            options["deadline"] = 10 ** rng.uniform(-3, 0)
        if rng.random() < 0.1:
            options["cache_salt"] = rng.choice("xy")
        return Asked(prompt, self._params(), fails, has_deadline), options

    def _params(self) -> SamplingParams:
        rng = self.rng
        length = rng.choice((1, 2, 3, 4, 4, 6, 8, 12, 48, 80))
        kind = rng.random()
        if kind < 0.6:
            return SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=rng.random() < 0.5)
        n = rng.choice((1, 1, 2, 3))
        if kind < 0.9:
            return SamplingParams(max_tokens=length, seed=rng.randrange(1000), top_k=50, n=n)
        return SamplingParams(
            max_tokens=length,
            seed=rng.randrange(1000),
            top_p=0.9,
            n=n,
            repetition_penalty=1.1,
            logprobs=2,
            stop=["\n", "def"],
            logit_bias={RAISES: -100.0, GIVES_NAN: -100.0},
        )


def reasons(asked: Asked, tokens: list[int]) -> set[str]:
    """What a completion of the request with these tokens may end with."""
    allowed = {"error"} if asked.fails else {"stop", "length"}
    if RAISES in tokens or GIVES_NAN in tokens:
        allowed.add("error")
    if asked.has_deadline:
        allowed.add("timeout")
    if asked.cancelled:
        allowed.add("cancelled")
    return allowed


def wrong_with(output: RequestOutput, asked: Asked) -> str | None:
    """What is wrong with the last output of a request, None if nothing is."""
    if list(output.prompt_token_ids) != asked.prompt:
        return "it has another's prompt"
    if len(output.outputs) != asked.params.n:
        return f"it has {len(output.outputs)} completions of {asked.params.n}"
    most = min(asked.params.max_tokens, MAX_MODEL_LEN - len(asked.prompt))
    for completion in output.outputs:
        reason, count = completion.finish_reason, len(completion.token_ids)
        allowed = reasons(asked, completion.token_ids)
        if reason not in allowed:
            return f"it ended with {reason!r} ({completion.error}) and not with one of {sorted(allowed)}"
        if count > most or (reason == "length" and count != most):
            return f"it has {count} tokens of {most} and ended with {reason!r}"
        if reason == "stop" and not (
            completion.stop_reason in asked.params.stop_strings
            or (completion.token_ids[-1] == EOS and not asked.params.ignore_eos)
        ):
            return f"it stopped at {completion.token_ids[-1]} for no reason"
    return None
