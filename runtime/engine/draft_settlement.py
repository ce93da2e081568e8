"""Draws the consequences of a step with drafts: tokens are appended before their keys count as computed."""

from __future__ import annotations

from collections.abc import Sequence

from ..batching import ScheduledRequest
from .state import EngineState
from .step_output import SampledToken
from .submission import Completion


def settle_drafts(
    state: EngineState, completion: Completion, item: ScheduledRequest, tokens: Sequence[SampledToken], now: float
) -> list[Completion]:
    """Give a completion the tokens of its share.

    The request advances by a row when the token that the next row was computed from is appended: hashes, snapshots
    and a restart see what steps of one token would show them.

    A state has seen the drafts of the whole step. If not all rows were accepted it is what it was before, and the
    accepted tokens are computed again with the next step.

    Returns:
        The completion, if it goes on. Its newest token still has to be appended in the runner.
    """
    request, batcher = completion.request, state.batcher
    if not batcher.block_manager.has_state:
        for place, token in enumerate(tokens):
            if place:
                state.runner.append_tokens([request], [tokens[place - 1].token_id])
            batcher.advance(request, 1 if place else item.num_tokens - item.num_draft_rows)
            if not state.append_token(completion, token, now):
                return []
        return [completion]
    if len(tokens) <= item.num_draft_rows:
        batcher.block_manager.take_back_step(request.request_id)
        return [completion] if state.append_until_end(completion, tokens, now) else []
    if not state.append_until_end(completion, tokens[:-1], now):
        return []
    state.runner.append_tokens([request], [tokens[-2].token_id])
    batcher.advance(request, item.num_tokens)
    return [completion] if state.append_token(completion, tokens[-1], now) else []
