"""Computes a step: pack, run the model, sample. Only the KV cache and the clocks change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..batching import ScheduledRequest
from ..npu_errors.device_lost import raise_if_lost
from ..npu_errors.remedies import explained_errors
from ..profiling.profile import MODEL, PACK, SAMPLE
from ..requests.request import Request
from ..sampling.beam_search import Candidates, likely_tokens
from ..sampling.sampler import Sampler
from ..structured.state import CANNOT_GO_ON, GrammarState
from .draft_verification import draw_tokens, first_rows
from .model_runner import StepLogits
from .state import EngineState
from .step_output import SampledToken, SampleTask, StepOutput
from .submission import one_line

logger = logging.getLogger(__name__)

_NOTHING_LEFT = f"{CANNOT_GO_ON} (together with fields such as allowed_token_ids it would allow no choice)"
UNUSABLE_LOGITS = "the model's logits allow no token (NaN, infinity, or every token ruled out)"


class StepComputer:
    """Runs what was planned.

    Args:
        state: its runner packs steps and runs the model; the time spent is added to its clocks.
        sampler: chooses tokens.

    Attributes:
        wait: called between the model and the choice of tokens.
    """

    def __init__(self, state: EngineState, sampler: Sampler) -> None:
        self.state = state
        self.sampler = sampler
        self.wait: Callable[[], None] = lambda: None

    def compute(self, scheduled: Sequence[ScheduledRequest], tasks: Sequence[SampleTask]) -> list[StepOutput]:
        """Run the model and choose; if that raises, each request runs alone, so that only culprits fail.

        Keys and values can be written a second time, a state that was written over cannot: whose state that is gets
        an output that says so. ``DeviceLost`` is raised: no request would run alone.

        Args:
            scheduled: of one step.
            tasks: one for each; nothing is sampled for those that have tokens left to compute.
        """
        try:
            with explained_errors(), without_autocast(self.state.runner.program.device.type):
                return self._compute_together(scheduled, tasks)
        except Exception as error:
            raise_if_lost(error)
            if len(scheduled) == 1:
                logger.debug("a model step failed", exc_info=True)
                return [StepOutput(error=f"the model step failed with {one_line(error)}")]
            logger.warning(
                "a model step of %d requests failed (%s); running them one by one",
                len(scheduled),
                one_line(error),
            )
        return self.compute_one_by_one(scheduled, tasks)

    def compute_one_by_one(
        self, scheduled: Sequence[ScheduledRequest], tasks: Sequence[SampleTask]
    ) -> list[StepOutput]:
        """As ``compute``, where the attempt to run all together has failed."""
        return [
            StepOutput(is_spoilt=True) if item.overwrites_state else self.compute([item], [task])[0]
            for item, task in zip(scheduled, tasks, strict=True)
        ]

    def _compute_together(
        self, scheduled: Sequence[ScheduledRequest], tasks: Sequence[SampleTask]
    ) -> list[StepOutput]:
        started, state = time.perf_counter(), self.state
        packed = state.runner.pack(scheduled)
        state.profiler.mark(PACK)
        logits = state.runner.run(scheduled, packed)
        self.wait()
        state.profiler.mark(MODEL)
        seconds = time.perf_counter() - started
        state.model_seconds += seconds
        state.cost.measure_step(scheduled, seconds)
        outputs = self.choose_tokens(scheduled, tasks, logits)
        state.profiler.mark(SAMPLE)
        return outputs

    def choose_tokens(
        self, scheduled: Sequence[ScheduledRequest], tasks: Sequence[SampleTask], logits: StepLogits
    ) -> list[StepOutput]:
        """Choose tokens by the logits of a step; arguments as for ``compute``."""
        sampling = [i for i, item in enumerate(scheduled) if item.is_last_chunk]
        draw = partial(self._draw, logits.sampled)
        items = [scheduled[i] for i in sampling]
        tokens = iter(draw_tokens(draw, items, [tasks[i].requests for i in sampling]))
        searched = zip(first_rows(items), [tasks[i].num_candidates for i in sampling], strict=True)
        candidates = iter(self._candidates(logits.sampled, [(row, count) for row, count in searched if count]))
        outputs = [StepOutput(prompt_logits=logits.prompts.get(i)) for i in range(len(scheduled))]
        for i in sampling:
            own = next(tokens)
            if tasks[i].num_candidates:
                likely = next(candidates)
                outputs[i] = StepOutput(candidates=likely, error=UNUSABLE_LOGITS if likely is None else None)
            else:
                outputs[i] = StepOutput(own, prompt_logits=outputs[i].prompt_logits)
        return outputs

    def _draw(self, logits: Tensor, requests: Sequence[Request], rows: Sequence[int]) -> list[SampledToken]:
        """A token for each request from its row of the logits."""
        if len(rows) * 2 < len(logits):  # all rows are searched for their likeliest tokens
            places = {row: place for place, row in enumerate(sorted(set(rows)))}
            logits = logits[torch.tensor(list(places), device=logits.device)]
            rows = [places[row] for row in rows]
        drawn = self.sampler.sample(logits, requests, rows)
        tokens = [SampledToken(*pair) for pair in zip(drawn.token_ids, drawn.logprobs, strict=True)]
        for failed in drawn.failed:
            tokens[failed] = SampledToken(error=_no_choice(logits[rows[failed]], requests[failed].grammar))
        return tokens

    def _candidates(self, logits: Tensor, counts: Sequence[tuple[int, int]]) -> list[Candidates | None]:
        """The tokens that may follow rows, as many as beside each of them."""
        if not counts:
            return []
        rows = torch.tensor([row for row, _ in counts], device=logits.device)
        return likely_tokens(logits[rows], [count for _, count in counts])


def _no_choice(logits: Tensor, grammar: GrammarState | None) -> str:
    """Why none of the tokens with these logits ``[V]`` can be chosen."""
    if grammar is not None and grammar.error is not None:
        return grammar.error
    return UNUSABLE_LOGITS if grammar is None or not logits.isfinite().all() else _NOTHING_LEFT
