"""New pieces of output: the part of each completion that the caller has not received, delivered exactly once.

A piece is made without changing anything and given afterwards, by ``NewPiece.give``, which may be repeated. So
whoever is interrupted between the two either gives it again or makes it anew, and none is lost.
"""

from __future__ import annotations

from dataclasses import replace

from ..requests.outputs import StreamPiece
from .state import EngineState
from .submission import Completion, NewPiece, Submission


def new_pieces(state: EngineState, submission: Submission) -> list[NewPiece]:
    """What of a submission is new, at most a piece for each completion, inside ``EngineCore.transaction``.

    Of one that is ``final_only`` each completion has a single piece, at its end; where the best ones are to be found,
    all have it when the last has ended.
    """
    if submission.num_returned is not None:
        return _best(submission) if submission.is_finished else []
    found = []
    for completion in submission.completions:
        if submission.final_only and not completion.is_finished:
            continue
        new = completion.new_piece()
        if end_undecodable(state, completion):
            new = completion.new_piece()
        if new is not None:
            found.append(NewPiece(new[0], [(completion, new[1])]))
    scores = submission.completions[0].prompt_logprobs
    if scores is not None and found and found[0].piece.index == 0 and not submission.completions[0].given[0]:
        first = replace(found[0].piece, prompt_logprobs=list(scores.entries))
        found[0] = NewPiece(first, found[0].marks)
    if found and submission.is_finished:
        last = replace(found[-1].piece, metrics=submission.metrics(finished=True))
        found[-1] = NewPiece(last, found[-1].marks)
    return found


def end_undecodable(state: EngineState, completion: Completion) -> bool:
    """End a completion whose text cannot be given, inside ``transaction``; returns whether it was ended by this."""
    if completion.text_error is None or completion.is_finished:
        return False
    state.end(completion, "error", completion.text_error)
    return True


def _best(submission: Submission) -> list[NewPiece]:
    """The only pieces of a submission whose best completions are wanted; none if they have been given."""
    if any(completion.is_given for completion in submission.completions):
        return []
    output = submission.output()
    marks = [(completion, completion.end_mark) for completion in submission.completions]
    metrics = [None] * (len(output.outputs) - 1) + [output.metrics]
    return [
        NewPiece(
            StreamPiece(
                text=best.text,
                token_ids=best.token_ids,
                finished=True,
                finish_reason=best.finish_reason,
                stop_reason=best.stop_reason,
                error=best.error,
                index=best.index,
                logprobs=best.logprobs,
                request_id=submission.request_id,
                prompt_logprobs=None if best.index else output.prompt_logprobs,
                num_cached_tokens=output.num_cached_tokens,
                metrics=last,
            ),
            marks,
        )
        for best, last in zip(output.outputs, metrics, strict=True)
    ]
