"""One sequence on its way through the engine: what was asked, what is computed, what came out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from .sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestStatus(enum.Enum):
    """Where a request is: in the queue without blocks, running with blocks, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One sequence. Compared and hashed by identity.

    The batcher owns ``arrival``, ``num_computed_tokens``, ``status``, ``finish_reason``, ``error`` and
    ``num_preemptions``; the runner owns ``row``; the engine appends to ``output_token_ids`` and sets
    ``stop_reason`` and the times, which are seconds on whatever clock the engine reads.

    Attributes:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one id.
        params: how to sample and when to stop; ``n`` is not looked at here.
        arrival: position in the order of arrival; -1 until the batcher has accepted the request.
        output_token_ids: sampled ids, oldest first. They survive preemption.
        num_computed_tokens: leading tokens whose keys and values are in the cache.
        finish_reason: why it ended, None before.
        stop_reason: the stop string or stop token id that ended it, None for EOS and other reasons.
        error: one line, when ``finish_reason`` is "error".
        num_preemptions: times that it lost its blocks and had to be recomputed.
        row: the runner's row while running, else None.
    """

    request_id: str
    prompt_token_ids: list[int] | npt.NDArray[np.integer]
    params: SamplingParams
    arrival: int = -1

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_preemptions: int = 0
    row: int | None = None

    arrival_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    num_prompt_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        if not self.num_prompt_tokens:
            raise ValueError(f"prompt_token_ids of request {self.request_id!r} is empty; give at least one token")

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together, computed or not."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """It ended, for whatever reason; ``finish_reason`` says which."""
        return self.status is RequestStatus.FINISHED
