"""One sequence on its way through the engine: its parameters, progress and output."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..structured.state import GrammarState
from .sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class RequestStatus(enum.Enum):
    """State of a request: waiting in the queue without blocks, running with blocks, or finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One sequence. Compared and hashed by identity.

    The batcher owns ``arrival``, ``rank``, ``num_computed_tokens``, ``num_cached_tokens``, ``block_hashes``,
    ``status``, ``is_paused``, ``finish_reason``, ``error``, ``num_preemptions`` and ``num_output_placeholders``; the
    runner owns ``row``; the engine appends to ``output_token_ids`` and sets ``stop_reason`` and the times, which are
    seconds on the engine's clock.

    Attributes:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one id.
        params: how to sample and when to stop; ``n`` is ignored here.
        priority: lower comes first under ``policy="priority"``.
        client: owner of the request, for policies that are fair between clients.
        deadline: time at which an unfinished request ends with "timeout", on the clock that the batcher gets.
        cache_salt: only requests with the same salt share cached blocks.
        in_one_run: allocate its blocks next to one another if possible.
        arrival: position in the order of arrival; -1 until the batcher has accepted the request.
        rank: its position in the order of the policy.
        output_token_ids: sampled ids, oldest first. They survive preemption.
        num_computed_tokens: leading tokens whose keys and values are in the cache, or in host memory.
        num_cached_tokens: leading tokens found in the prefix cache when the request began to run.
        block_hashes: content hashes of its leading full blocks.
        is_paused: it is not scheduled until it is resumed, see ``Batcher.pause``.
        finish_reason: why it ended, None until then.
        stop_reason: the stop string or stop token id that ended it, None for EOS and other reasons.
        error: one-line reason when ``finish_reason`` is "error".
        num_preemptions: number of times that it lost its blocks.
        num_output_placeholders: tokens after ``output_token_ids`` that launched steps sample and the host does
            not know yet; 0 unless steps are scheduled ahead.
        row: the runner's row while running, else None.
        grammar: its state in the grammar of ``params.structured_outputs``; the engine moves it on.
        max_tokens: most tokens to generate.
    """

    request_id: str
    prompt_token_ids: list[int] | npt.NDArray[np.integer]
    params: SamplingParams
    priority: int = 0
    client: str = ""
    deadline: float | None = None
    cache_salt: str = ""
    in_one_run: bool = False
    arrival: int = -1
    rank: tuple[float, int] = (0.0, -1)

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    is_paused: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_preemptions: int = 0
    num_output_placeholders: int = 0
    row: int | None = None
    grammar: GrammarState | None = None

    arrival_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    num_prompt_tokens: int = field(init=False, default=0)
    max_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.params.max_tokens is None:
            text = f"max_tokens of request {self.request_id!r} is None; resolve it with SamplingParams.within"
            raise ValueError(text)
        self.max_tokens = self.params.max_tokens
        self.num_prompt_tokens = len(self.prompt_token_ids)
        if not self.num_prompt_tokens:
            raise ValueError(f"prompt_token_ids of request {self.request_id!r} is empty; pass at least one token")

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens, computed or not."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_tokens_with_placeholders(self) -> int:
        """``num_tokens`` plus the tokens that launched steps sample."""
        return self.num_prompt_tokens + len(self.output_token_ids) + self.num_output_placeholders

    @property
    def longest(self) -> int:
        """Number of prompt tokens plus the most that may be generated."""
        return self.num_prompt_tokens + self.max_tokens

    def tokens(self, first: int, end: int) -> list[int] | npt.NDArray[np.integer]:
        """Return the ids at positions ``first .. end - 1`` of prompt + output."""
        prompt = self.num_prompt_tokens
        if end <= prompt:
            return self.prompt_token_ids[first:end]
        output = self.output_token_ids[max(0, first - prompt) : end - prompt]
        return output if first >= prompt else [*self.prompt_token_ids[first:], *output]

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """True once the request ended for any reason; ``finish_reason`` says which."""
        return self.status is RequestStatus.FINISHED
