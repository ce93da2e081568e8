"""The record that the parts of an engine share: what is in it, what was counted, and how a completion goes on or
ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from ..batching import Batcher, PreemptionCost, ScheduledRequest
from ..block_store.traffic import Traffic
from ..profiling.profiler import Profiler
from ..requests.request import FinishReason, Request, RequestStatus
from ..speculation.drafting import Drafting
from ..structured.state import GrammarError
from .model_runner import ModelRunner
from .step_output import SampledToken
from .step_sizes import StepSizes
from .submission import Completion, NewPiece, Submission, undecodable

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class EngineState:
    """The submissions in an engine and the figures of its steps. It is changed inside ``EngineCore.transaction``.

    Attributes:
        batcher: says who runs next.
        runner: has the rows of those that run, and runs the model.
        cost: estimates the cost of preemption from the durations of steps and copies.
        profiler: gets the marks of the phases of a step.
        drafting: plans drafts; None: there are none.
        traffic: fetches and stores blocks; None: nothing is stored.
        submissions: by id; those of ``generate`` and ``stream`` until they end, others until their last
            output has been given to the caller.
        completions: the unfinished ones, by the id of their request.
        updated: submissions that progressed or ended since the caller last got outputs.
        pieces: pieces that a call was to return which was interrupted; the next one does.
        sampled: ids of the sequences that got tokens in this step, one for each token.
        model_seconds: spent in packing and in the model.
        total_seconds: of steps.
    """

    batcher: Batcher
    runner: ModelRunner
    cost: PreemptionCost
    profiler: Profiler = field(default_factory=Profiler)
    drafting: Drafting | None = None
    traffic: Traffic | None = None
    submissions: dict[str, Submission] = field(default_factory=dict)
    completions: dict[str, Completion] = field(default_factory=dict)
    updated: dict[str, Submission] = field(default_factory=dict)
    pieces: list[NewPiece] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)
    step_sizes: StepSizes = field(default_factory=StepSizes)
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_failed: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))
    model_seconds: float = 0.0
    total_seconds: float = 0.0
    next_id: int = 0

    def measure_step(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """Record the seconds of a step without drafts."""
        self.cost.measure_step(scheduled, seconds)
        if self.drafting is not None:
            rows = sum([item.num_tokens for item in scheduled])
            self.drafting.lengths.measure(len(scheduled), rows, seconds)

    def end(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        """End a completion; nothing happens if it has ended."""
        request, owner = completion.request, completion.owner
        if request.is_finished:
            return
        if error is not None:
            self.num_failed += 1
            logger.warning("request %s fails: %s", owner.request_id, error)
        followers = self.followers(completion)
        request.finished_time = time.perf_counter()
        if self.drafting is not None:
            self.drafting.finished(request)  # while it still has its blocks
        if self.batcher.get(request.request_id) is request:
            self.batcher.finish(request, reason, error)
        else:  # it follows another
            request.finish_reason, request.error, request.status = reason, error, RequestStatus.FINISHED
        self.runner.remove(request)
        self.completions.pop(request.request_id, None)
        if owner.is_finished:
            self.num_finished[reason] += 1
            ids = [c.request.request_id for c in owner.completions]
            self.profiler.end_request(owner.request_id, owner.metrics(finished=True), ids)
        for follower in followers:
            # Whatever kept the first from computing the prompt keeps them too.
            self.end(follower, reason, error)
        if not owner.is_private:
            self.updated[owner.request_id] = owner
        elif owner.is_finished:
            self.submissions.pop(owner.request_id, None)

    def end_early(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        """End a completion that is not complete; a beam ends its whole search."""
        for other in completion.owner.end_with(completion, error):
            self.end(other, "cancelled")
        self.end(completion, reason, error)

    def new_id(self) -> str:
        """An id that no unfinished request has."""
        while str(self.next_id) in self.submissions:
            self.next_id += 1
        self.next_id += 1
        return str(self.next_id - 1)

    def forget(self, submission: Submission) -> None:
        """Take a submission out; nothing happens to another of its id."""
        for known in (self.submissions, self.updated):
            if known.get(submission.request_id) is submission:
                del known[submission.request_id]

    def forget_finished(self) -> None:
        """Take out the submissions of ``updated`` that have ended: their last output is about to be given."""
        for submission in self.updated.values():
            if submission.is_finished:
                self.submissions.pop(submission.request_id, None)

    def followers(self, completion: Completion) -> list[Completion]:
        """The completions of its prompt that wait for it to compute the prompt."""
        siblings = completion.owner.completions
        if len(siblings) == 1 or completion is not siblings[0]:
            return []
        return [
            c for c in siblings[1:] if not c.is_finished and self.batcher.get(c.request.request_id) is not c.request
        ]

    def append_tokens(
        self, completion: Completion, tokens: Sequence[Sequence[SampledToken]], now: float
    ) -> list[Completion]:
        """Append sampled tokens: the completion's own, and those of each that follows it, which runs from now on.

        Returns:
            The completions that go on. The newest token of each still has to be appended in the runner.
        """
        request = completion.request
        followers = self.followers(completion)
        for follower in followers:
            self.batcher.fork(request, follower.request)
            follower.request.first_scheduled_time = request.first_scheduled_time
        sharing = (completion, *followers)
        return [each for each, own in zip(sharing, tokens, strict=True) if self.append_until_end(each, own, now)]

    def append_until_end(self, completion: Completion, tokens: Sequence[SampledToken], now: float) -> bool:
        """Append tokens up to one that ends the completion; returns whether it goes on behind all of them."""
        request = completion.request
        for place, token in enumerate(tokens):
            if place and request.row is not None:
                self.runner.append_tokens([request], [tokens[place - 1].token_id])
            if not self.append_token(completion, token, now):
                return False
        return True

    def append_token(self, completion: Completion, token: SampledToken, now: float) -> bool:
        """Append a token; returns whether the completion goes on."""
        request, owner = completion.request, completion.owner
        if token.error is not None:
            self.end(completion, "error", token.error)
            return False
        self.note_sampled(request, now)
        self.num_generated_tokens += 1
        goes_on = False
        try:
            reason = completion.append(token.token_id, token.logprob)
        except GrammarError as error:
            self.end(completion, "error", str(error))
        except Exception as error:
            self.end(completion, "error", undecodable(error))
        else:
            if reason is None:
                goes_on = True
                self.restart_if_outgrown(request)
            else:
                self.end(completion, reason)
        completion.num_settled = len(request.output_token_ids)
        if not (owner.is_private or owner.final_only):
            self.updated[owner.request_id] = owner
        return goes_on

    def note_sampled(self, request: Request, now: float) -> None:
        """Note for the metrics that a token was sampled for the request in this step."""
        if request.first_token_time is None:
            request.first_token_time = now
        self.sampled.append(request.request_id)

    def restart_if_outgrown(self, request: Request) -> None:
        """Compute the request anew if its keys changed with its newest token, see ``Program.restart_length``."""
        limit = self.runner.program.restart_length
        if limit is not None and request.num_prompt_tokens <= limit and request.num_tokens == limit + 1:
            self.batcher.restart(request)
