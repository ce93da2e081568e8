"""Beam search in the engine: each live beam is a request of its own, and beams share the blocks of what they share.

All live beams of a search have the same length. A beam that has computed its last token leaves here what may follow
that, and pauses; when all beams have done so, the search takes a step: the first child of a beam goes on in its
request, further children are branched off from it, and a beam without a child ends.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..requests.beam_search_params import BeamSearchParams
from ..requests.detokenizer import Detokenizer, Tokenizer
from ..requests.outputs import BeamSearchOutput, BeamSearchSequence, RequestMetrics
from ..requests.request import Request
from ..requests.request_options import RequestOptions
from ..requests.sampling_params import SamplingParams
from ..sampling.beam_search import BeamSearch, Candidates
from .state import EngineState
from .submission import Completion, Submission, earliest, undecodable


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The changes that a step of a search makes; nothing is changed yet.

    Attributes:
        search: the search after it.
        completions: of its beams, in their order.
        branches: parent and child, for the completions that are new.
        ended: completions of beams that do not go on.
    """

    search: BeamSearch
    completions: list[Completion]
    branches: list[tuple[Completion, Completion]]
    ended: list[Completion]


@dataclass(eq=False, slots=True, kw_only=True)
class BeamSubmission(Submission):
    """A prompt that is searched for; its ``completions`` are those of ``search.beams``, in their order.

    Attributes:
        search: what has been found; the only thing that is needed to go on from.
        tokenizer: makes the text.
        candidates: of the beams that have computed their last token, since the last step of the search.
        error: why the search ended before its time.
        num_steps: of all beams together.
        num_former_preemptions: of beams that have ended.
    """

    search: BeamSearch
    tokenizer: Tokenizer | None = None
    candidates: dict[Completion, Candidates] = field(default_factory=dict)
    error: str | None = None
    num_steps: int = 0
    num_former_preemptions: int = 0
    _num_requests: int = 0

    def begin(self, options: RequestOptions, max_model_len: int) -> None:
        """Make the request of the first beam, which computes the prompt."""
        params = SamplingParams(temperature=0, max_tokens=self.search.params.max_tokens)
        request = options.request(self._next_request_id(), self.prompt_token_ids, params, self.arrival_time)
        self.completions = [Completion(self, request, 0, max_model_len, (), None, None)]

    def end_with(self, completion: Completion, error: str | None) -> list[Completion]:
        """A beam takes its whole search with it."""
        self.error = "its deadline has passed" if error is None else error
        return [other for other in self.completions if other is not completion]

    def take_candidates(
        self, state: EngineState, completion: Completion, candidates: Candidates | None, now: float
    ) -> list[Completion]:
        """Keep what may follow a beam; when all beams have that, the search takes a step.

        Returns:
            The completions that got a token and go on.
        """
        if candidates is None:
            return []
        state.batcher.pause(completion.request)
        self.candidates[completion] = candidates
        return self._advance(state, now) if len(self.candidates) == len(self.completions) else []

    def _advance(self, state: EngineState, now: float) -> list[Completion]:
        """Let the search take a step; returns the completions that got a token."""
        step = self.next_step()
        num_tokens = len(self.completions)
        for completion in self.completions:
            state.note_sampled(completion.request, now)
        # From here on what is to be done follows from the search: see ``restore``.
        self.search = step.search
        self.candidates = {}
        self.num_steps += num_tokens
        state.num_generated_tokens += num_tokens
        if step.search.is_done:
            for completion in self.completions:
                state.end(completion, "stop")
            return []
        for completion in step.ended:
            self.num_former_preemptions += completion.request.num_preemptions
            state.end(completion, "stop")
        for parent, child in step.branches:
            child.request.first_token_time = parent.request.first_token_time
            state.completions[child.request.request_id] = child
            state.batcher.branch(parent.request, child.request)
        new = {child for _, child in step.branches}
        self.completions = step.completions
        for completion, beam in zip(step.completions, step.search.beams, strict=True):
            request = completion.request
            if completion not in new:
                request.output_token_ids.append(beam.token_ids[-1])
                state.batcher.resume(request)
            completion.num_settled = request.num_output_tokens
            state.restart_if_outgrown(request)
        return step.completions

    def next_step(self) -> BeamStep:
        """The next step of the search, of which all beams have their candidates."""
        parents = self.completions
        search = copy.copy(self.search)
        rows = [self.candidates[parent] for parent in parents]
        beams = search.advance(np.stack([ids for ids, _ in rows]), np.stack([values for _, values in rows]))
        completions: list[Completion] = []
        branches: list[tuple[Completion, Completion]] = []
        ended = set(parents)
        for beam in beams:
            parent = parents[beam.parent]
            if parent in ended:  # this is the first child
                ended.remove(parent)
                completions.append(parent)
            else:
                child = self._sibling(parent, beam.token_ids)
                branches.append((parent, child))
                completions.append(child)
        return BeamStep(search, completions, branches, [parent for parent in parents if parent in ended])

    def restore(self) -> None:
        """Return to the last step of the search, from whatever state an interrupted call left this in."""
        self.candidates = {}
        known = self.completions
        for completion in known:
            completion.restore()
        if known and all([completion.is_finished for completion in known]):
            return
        if self.error is not None or self.search.is_done:
            self.completions = []
            return
        live = [completion for completion in known if not completion.is_finished]
        completions = []
        for i, beam in enumerate(self.search.beams):
            completion = live[i] if i < len(live) else self._sibling(known[0], beam.token_ids)
            completion.request.output_token_ids[:] = beam.token_ids
            completion.num_settled = len(beam.token_ids)
            completions.append(completion)
        self.completions = completions

    def metrics(self, finished: bool) -> RequestMetrics:
        """Times and counts of all beams together."""
        requests = [completion.request for completion in self.completions]
        return RequestMetrics(
            self.arrival_time,
            earliest(request.first_scheduled_time for request in requests),
            earliest(request.first_token_time for request in requests),
            max([request.finished_time or 0.0 for request in requests], default=None) if finished else None,
            self.num_steps,
            self.num_former_preemptions + sum(request.num_preemptions for request in requests),
        )

    def result(self) -> BeamSearchOutput:
        """The texts that the search has found."""
        error = self.error
        if error is None and not self.search.is_done:
            error = "the search was cancelled"
        try:
            sequences = [
                BeamSearchSequence(
                    self._text(text.token_ids[:-1] if text.finish_reason == "stop" else text.token_ids),
                    list(text.token_ids),
                    text.cumulative_logprob,
                    text.score,
                    text.finish_reason,
                )
                for text in self.search.hypotheses
            ]
        except Exception as failure:
            error, sequences = undecodable(failure), []
        return BeamSearchOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            sequences,
            self.metrics(finished=True),
            error,
            self.completions[0].request.num_cached_tokens if self.completions else 0,
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer is None or not token_ids:
            return ""
        detokenizer = Detokenizer(self.tokenizer, self.prompt_token_ids)
        detokenizer.append(token_ids, check_stop=False)
        detokenizer.finish(check_stop=False)
        return detokenizer.text

    def _sibling(self, parent: Completion, token_ids: Sequence[int]) -> Completion:
        """A completion on the terms of ``parent``, which goes on after ``token_ids``."""
        old = parent.request
        request = Request(
            self._next_request_id(),
            old.prompt_token_ids,
            old.params,
            priority=old.priority,
            client=old.client,
            deadline=old.deadline,
            cache_salt=old.cache_salt,
            in_one_run=old.in_one_run,
            output_token_ids=list(token_ids),
            num_cached_tokens=old.num_cached_tokens,
            arrival_time=old.arrival_time,
            first_scheduled_time=old.first_scheduled_time,
            first_token_time=old.first_token_time,
        )
        return Completion(
            self, request, 0, parent.max_model_len, (), None, None, num_settled=len(request.output_token_ids)
        )

    def _next_request_id(self) -> str:
        self._num_requests += 1
        return f"{self.request_id}\0{self._num_requests}"  # no caller's id holds a zero


def bounded(params: BeamSearchParams, num_prompt_tokens: int, max_model_len: int) -> BeamSearchParams:
    """The parameters with ``max_tokens`` lowered to what a prompt leaves room for, which None asks for."""
    room = max_model_len - num_prompt_tokens
    return replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))
