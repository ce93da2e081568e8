"""Draws the consequences of a step with drafts: tokens are appended before their keys count as computed."""

from __future__ import annotations

from collections.abc import Sequence

from ..batching import ScheduledRequest
from ..blocks import BlockManager
from .state import EngineState
from .step_output import SampledToken, StepOutput
from .submission import Completion


def settle_states(blocks: BlockManager, scheduled: Sequence[ScheduledRequest], outputs: Sequence[StepOutput]) -> None:
    """Leave each sequence with drafts one slot: that of the step if all its rows were accepted, or the one before.

    That is the first thing to do, as snapshots of all need the slots.
    """
    for item, output in zip(scheduled, outputs, strict=True):
        if not item.num_draft_rows:
            continue
        name = item.request.request_id
        if output.tokens and len(output.tokens[0]) > item.num_draft_rows:
            blocks.end_step(name, item.start + item.num_tokens)
        else:
            blocks.take_back_step(name)


def settle_drafts(
    state: EngineState, completion: Completion, item: ScheduledRequest, tokens: Sequence[SampledToken], now: float
) -> list[Completion]:
    """Give a completion the tokens of its share.

    The request advances by a row when the token that the next row was computed from is appended: hashes, snapshots
    and a restart see what steps of one token would show them.

    A state has seen the drafts of the whole step. If not all rows were accepted it is what it was before (see
    ``settle_states``), and the accepted tokens are computed again with the next step.

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
        return [completion] if state.append_until_end(completion, tokens, now) else []
    if not state.append_until_end(completion, tokens[:-1], now):
        return []
    state.runner.append_tokens([request], [tokens[-2].token_id])
    batcher.advance(request, item.num_tokens)
    return [completion] if state.append_token(completion, tokens[-1], now) else []
