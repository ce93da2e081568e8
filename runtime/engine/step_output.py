"""Data between a step and the submissions: what to sample for a request, and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..requests.outputs import Logprob
from ..requests.request import Request
from ..sampling.beam_search import Candidates


@dataclass(frozen=True, slots=True)
class SampleTask:
    """The use of the last row of a scheduled request.

    Attributes:
        requests: those that sample a token from it: the request, and others that share its prompt.
        num_candidates: how many of the likeliest tokens a search wants of it instead.
    """

    requests: Sequence[Request] = ()
    num_candidates: int = 0


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, or why there is none."""

    token_id: int = -1
    logprob: dict[int, Logprob] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The outcome of a step for one of its requests.

    Attributes:
        tokens: for each request of its ``SampleTask`` those that it is given, oldest first: 1 to k. A request that
            ends with one of them is not given those behind it; of one that goes on the next step computes all but the
            newest first, as a share of a prompt.
        candidates: what may follow a beam.
        prompt_logits: ``[num_tokens, vocab_size]``, the rows of its tokens, where the prompt is scored.
        error: why there is nothing.
        is_spoilt: a failed step has written over a part of its state; it is to be computed anew.
    """

    tokens: tuple[tuple[SampledToken, ...], ...] = ()
    candidates: Candidates | None = None
    prompt_logits: Tensor | None = None
    error: str | None = None
    is_spoilt: bool = False
