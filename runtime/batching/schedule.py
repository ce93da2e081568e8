"""The plan of one step, as the batcher returns it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..blocks import CacheCopy
from ..requests.request import Request


class ScheduledRequest(NamedTuple):
    """A request's share of one step: tokens ``start .. start + num_tokens - 1`` of prompt + output.

    Attributes:
        request: the request; its tables already hold ``start + num_tokens`` tokens.
        num_tokens: number of tokens to compute, >= 1.
        start: the request's ``num_computed_tokens`` when the step was planned.
        is_last_chunk: no token is left to compute after this share, so its last token's logits are sampled.
        state_read, state_write: slots of its state, see ``StepMetadata``; -1 if the model keeps none.
        drafts: proposals for the tokens that follow. The share computes them behind the request's own tokens, which
            they are counted with in ``num_tokens``.
        num_filled: further tokens behind those, of any id, whose logits nobody looks at.
    """

    request: Request
    num_tokens: int
    start: int
    is_last_chunk: bool
    state_read: int = -1
    state_write: int = -1
    drafts: tuple[int, ...] = ()
    num_filled: int = 0

    @property
    def num_draft_rows(self) -> int:
        """Number of its tokens that are not the request's own."""
        return len(self.drafts) + self.num_filled

    @property
    def overwrites_state(self) -> bool:
        """True if the step overwrites the state that it reads, so that it cannot be run a second time."""
        return self.state_read >= 0 and self.state_read == self.state_write


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step.

    Attributes:
        requests: shares to run: decodes first, then prefill chunks, each in the order of the policy.
        preempted: requests that lost their blocks and went back to the queue; none of them is in ``requests``.
        expired: requests whose deadline has passed; they stay queued or hold blocks until they are finished.
        new_blocks: request id → block ids to append to its table, for each group; only for requests with new ones.
        tables: request id → its tables, one per group, if they are not the former ones with blocks appended. In both,
            the group of states, if there is one, is the last and need not be stored: see ``requests``.
        num_tokens: tokens of all ``requests`` together.
        copies: block copies to make one after the other before the step runs.
        overlapped_copies: copies of blocks that the step does not use, to make while it runs.
    """

    requests: list[ScheduledRequest]
    preempted: list[Request] = field(default_factory=list)
    expired: list[Request] = field(default_factory=list)
    new_blocks: dict[str, list[list[int]]] = field(default_factory=dict)
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    num_tokens: int = 0
    copies: list[CacheCopy] = field(default_factory=list)
    overlapped_copies: list[CacheCopy] = field(default_factory=list)


class Plan:
    """A schedule under construction.

    Args:
        budget: number of tokens that may still be planned.
    """

    __slots__ = ("budget", "new_blocks", "planned", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.planned: dict[str, ScheduledRequest] = {}
        self.preempted: list[Request] = []
        self.new_blocks: dict[str, list[list[int]]] = {}

    def replace(self, item: ScheduledRequest, added: list[list[int]]) -> None:
        """Put a share into the place of the request's, which has fewer tokens.

        Args:
            item: the share.
            added: blocks for it, for each group.
        """
        name = item.request.request_id
        self.budget -= item.num_tokens - self.planned[name].num_tokens
        self.planned[name] = item
        if any(added):
            before = self.new_blocks.get(name, [[] for _ in added])
            self.new_blocks[name] = [a + b for a, b in zip(before, added, strict=True)]

    def drop(self, request: Request) -> None:
        """Remove the request's share from the plan."""
        planned = self.planned.pop(request.request_id, None)
        if planned is not None:
            self.budget += planned.num_tokens
            self.new_blocks.pop(request.request_id, None)
