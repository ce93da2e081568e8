"""What a step computes: pack, run the model, choose. Nothing but the KV cache and the clocks changes by it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..batching import PreemptionCost, ScheduledRequest
from ..profiling.profile import MODEL, PACK, SAMPLE
from ..profiling.profiler import Profiler
from ..requests.outputs import Logprob
from ..requests.request import Request
from ..sampling.sampler import Sampler
from .beam_submission import Candidates, likely_tokens
from .model_runner import Runner
from .submission import one_line

logger = logging.getLogger(__name__)

_UNUSABLE_LOGITS = "the model's logits allow no choice (NaN, infinity, or every token ruled out)"


@dataclass(frozen=True, slots=True)
class Draw:
    """What is made of the last row of a scheduled request.

    Attributes:
        takers: who draw a token from it: the request, and others that share its prompt.
        num_candidates: how many of the likeliest tokens a search wants of it instead.
    """

    takers: Sequence[Request] = ()
    num_candidates: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A sampled token, or why there is none."""

    token: int = -1
    logprob: dict[int, Logprob] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave one of its requests.

    Attributes:
        choices: one for each taker.
        candidates: what may follow a beam.
        prompt_logits: ``[num_tokens, vocab_size]``, the rows of its tokens, where the prompt is scored.
        error: why there is nothing.
    """

    choices: tuple[Choice, ...] = ()
    candidates: Candidates | None = None
    prompt_logits: Tensor | None = None
    error: str | None = None


class StepComputer:
    """Runs what was planned.

    Args:
        runner: packs steps and runs the model.
        sampler: chooses tokens.
        cost: of preemption; it is told how long steps take.
        profiler: gets the marks of the phases.

    Attributes:
        model_seconds: spent in packing and in the model.
    """

    def __init__(self, runner: Runner, sampler: Sampler, cost: PreemptionCost, profiler: Profiler) -> None:
        self.runner = runner
        self.sampler = sampler
        self.cost = cost
        self.profiler = profiler
        self.model_seconds = 0.0

    def compute(self, scheduled: Sequence[ScheduledRequest], draws: Sequence[Draw]) -> list[Outcome]:
        """Run the model and choose; if that raises, each request runs alone, so that only culprits fail.

        Args:
            scheduled: of one step.
            draws: one for each; nothing is drawn for those that have tokens left to compute.
        """
        try:
            with without_autocast(self.runner.program.device.type):
                return self._compute_together(scheduled, draws)
        except Exception as error:
            if len(scheduled) == 1:
                logger.debug("a model step failed", exc_info=True)
                return [Outcome(error=f"the model step failed with {one_line(error)}")]
            logger.warning(
                "a model step of %d requests failed (%s); running them one by one",
                len(scheduled),
                one_line(error),
            )
        return [self.compute([item], [draw])[0] for item, draw in zip(scheduled, draws, strict=True)]

    def _compute_together(self, scheduled: Sequence[ScheduledRequest], draws: Sequence[Draw]) -> list[Outcome]:
        started = time.perf_counter()
        packed = self.runner.pack(scheduled)
        self.profiler.mark(PACK)
        logits = self.runner.run(scheduled, packed)
        self.profiler.mark(MODEL)
        seconds = time.perf_counter() - started
        self.model_seconds += seconds
        self.cost.measure_step(scheduled, seconds)
        sampling = [i for i, item in enumerate(scheduled) if item.is_last_chunk]
        choices = iter(self._choices(logits.sampled, [draws[i].takers for i in sampling]))
        candidates = iter(self._candidates(logits.sampled, [draws[i].num_candidates for i in sampling]))
        self.profiler.mark(SAMPLE)
        outcomes = [Outcome(prompt_logits=logits.prompts.get(i)) for i in range(len(scheduled))]
        for i in sampling:
            if draws[i].num_candidates:
                likely = next(candidates)
                outcomes[i] = Outcome(candidates=likely, error=_UNUSABLE_LOGITS if likely is None else None)
            else:
                own = tuple(next(choices) for _ in draws[i].takers)
                outcomes[i] = Outcome(own, prompt_logits=outcomes[i].prompt_logits)
        return outcomes

    def _choices(self, logits: Tensor, takers: Sequence[Sequence[Request]]) -> list[Choice]:
        """Each taker's token, in order; row r of the logits is that of ``takers[r]``."""
        requests = [request for own in takers for request in own]
        if not requests:
            return []
        drawn = self.sampler.sample(logits, requests, [row for row, own in enumerate(takers) for _ in own])
        choices = [Choice(*pair) for pair in zip(drawn.token_ids, drawn.logprobs, strict=True)]
        for failed in drawn.failed:
            choices[failed] = Choice(error=_UNUSABLE_LOGITS)
        return choices

    def _candidates(self, logits: Tensor, counts: Sequence[int]) -> list[Candidates | None]:
        """What may follow each row that is asked for candidates, in order."""
        rows = [row for row, count in enumerate(counts) if count]
        if not rows:
            return []
        return likely_tokens(logits[torch.tensor(rows, device=logits.device)], [counts[row] for row in rows])
