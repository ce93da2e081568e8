"""Reasons to settle a step before planning the next: requests whose next token depends on the host."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..batching import ScheduledRequest
    from ..requests.request import Request
    from .step_output import SampleTask

BEAMS: Final = "beam_search"
FORK: Final = "parallel_sampling"
GRAMMAR: Final = "structured_outputs"
PENALTIES: Final = "logits_processors"
LOGPROBS: Final = "logprobs"
PROMPT_LOGPROBS: Final = "prompt_logprobs"
RESTART: Final = "restart_length"
CANDIDATES: Final = "top_p_candidates"
SWAP: Final = "swap"
FAILED: Final = "failed_step"
BLOCKS: Final = "few_blocks"
DRAFTS: Final = "drafts"

REASONS: Final = (
    *(BEAMS, FORK, GRAMMAR, PENALTIES, LOGPROBS, PROMPT_LOGPROBS, RESTART, CANDIDATES, SWAP, FAILED, BLOCKS, DRAFTS),
)
"""Reason → its meaning, in ``Engine.stats`` after ``synchronous_steps_``:
- beam_search: which beams go on follows from the candidates of all.
- parallel_sampling: the prompt of several completions is computed, and they part.
- structured_outputs: the grammar says what may come, once it has the token before.
- logits_processors: penalties, bad words, min_tokens, logit_bias and allowed_token_ids are applied with what the host
  knows of the output.
- logprobs, prompt_logprobs: they are read from the logits, which hold until the next step.
- restart_length: all keys of a sequence change with its next token (longrope).
- top_p_candidates: top_p was seen to reach beyond the likeliest tokens, and is to look at more.
- swap: blocks are copied to host memory or back while the step runs.
- failed_step: sequences are computed anew, one by one, after a step has failed.
- few_blocks: a sequence of the step that runs might have to give up its blocks.
- drafts: how many of them are accepted says where their sequences go on; and the next step may have drafts.
"""


def why_synchronous(
    item: ScheduledRequest, task: SampleTask, restart_length: int | None, uncertain: Container[Request]
) -> str | None:
    """The reason why the host must know what this share of a step yields before the next step is planned.

    Args:
        item: the share.
        task: what is made of its last row.
        restart_length: of the program.
        uncertain: requests whose ``top_p`` reaches beyond the first candidates.
    """
    request, params = item.request, item.request.params
    if params.prompt_logprobs is not None and item.start < request.num_prompt_tokens - 1:
        return PROMPT_LOGPROBS
    if item.num_draft_rows:
        return DRAFTS
    if not item.is_last_chunk:
        return None
    if task.num_candidates:
        return BEAMS
    if len(task.requests) > 1:
        return FORK
    if request.grammar is not None:
        return GRAMMAR
    if params.changes_logits:
        return PENALTIES
    if params.logprobs is not None:
        return LOGPROBS
    if (
        restart_length is not None
        and request.num_prompt_tokens <= restart_length
        and item.start + item.num_tokens == restart_length
    ):
        return RESTART
    return CANDIDATES if request in uncertain else None
