"""Draws the tokens of a step: a request's draft is accepted where the request's own draw yields it.

The draw of each row is the one that a step of one token would make: with the request's seed and the number of tokens
before it, with penalties and masks that have seen the drafts that were accepted. So the tokens are the same with and
without drafts, and whatever a drafter proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate

from ..batching import ScheduledRequest
from ..requests.request import Request
from ..requests.sampling_params import SamplingParams
from ..structured.state import GrammarError, GrammarState
from .step_output import SampledToken

Draw = Callable[[Sequence[Request], Sequence[int]], list[SampledToken]]
"""Draws a token for each request from the row of logits beside it."""


@dataclass(frozen=True, slots=True)
class _Later:
    """A request as the sampler sees it behind some of its drafts, if its draw depends on their number only."""

    params: SamplingParams
    num_output_tokens: int
    num_output_placeholders: int = 0
    grammar: GrammarState | None = None


def draw_tokens(
    draw: Draw, items: Sequence[ScheduledRequest], sharing: Sequence[Sequence[Request]]
) -> list[tuple[tuple[SampledToken, ...], ...]]:
    """Draw the tokens that shares of a step yield.

    Args:
        draw: draws from the logits, which have a row for the last token of each share that is the request's own, and
            one for each of its further tokens.
        items: the shares.
        sharing: the requests that get a token from each; one where there are drafts, none where nothing is drawn.

    Returns:
        For each share the tokens of each of its requests.
    """
    firsts = first_rows(items)
    requests = [request for own in sharing for request in own]
    rows = [first for first, own in zip(firsts, sharing, strict=True) for _ in own]
    simple = [i for i, item in enumerate(items) if item.drafts and _is_simple(item.request)]
    for i in simple:
        request, count = items[i].request, len(items[i].drafts)
        start = request.num_output_tokens + 1
        requests += [_Later(request.params, start + place) for place in range(count)]  # type: ignore[misc]
        rows += range(firsts[i] + 1, firsts[i] + 1 + count)
    drawn = iter(draw(requests, rows) if requests else ())
    found = [[[next(drawn)] for _ in own] for own in sharing]
    for i in simple:
        further = [next(drawn) for _ in items[i].drafts]
        found[i][0] += further[: _num_accepted(items[i].drafts, [*found[i][0], *further])]
    others = [i for i, item in enumerate(items) if item.drafts and not _is_simple(item.request)]
    _draw_in_turn(draw, [(items[i], firsts[i], found[i][0]) for i in others])
    return [tuple(map(tuple, own)) for own in found]


def first_rows(items: Sequence[ScheduledRequest]) -> list[int]:
    """Return for each share the row of its last token that is the request's own."""
    return [0, *accumulate([1 + item.num_draft_rows for item in items])][: len(items)]


def _is_simple(request: Request) -> bool:
    """True if a draw depends on earlier tokens by their number only."""
    return request.grammar is None and not request.params.changes_logits


def _num_accepted(drafts: Sequence[int], tokens: Sequence[SampledToken]) -> int:
    count, most = 0, min(len(drafts), len(tokens))
    while count < most and tokens[count].error is None and tokens[count].token_id == drafts[count]:
        count += 1
    return count


def _draw_in_turn(draw: Draw, shares: Sequence[tuple[ScheduledRequest, int, list[SampledToken]]]) -> None:
    """Draw row after row as long as drafts are accepted; the tokens are added to each share's list."""
    with ExitStack() as stack:
        extensions = [stack.enter_context(_extension(item.request)) for item, _, _ in shares]
        left = list(zip(shares, extensions, strict=True))
        place = 0
        while left := [
            (share, extend)
            for share, extend in left
            if _num_accepted(share[0].drafts, share[2]) > place and extend(share[0].drafts[place])
        ]:
            place += 1
            tokens = draw([item.request for (item, _, _), _ in left], [first + place for (_, first, _), _ in left])
            for ((_, _, own), _), token in zip(left, tokens, strict=True):
                own.append(token)


@contextmanager
def _extension(request: Request) -> Iterator[Callable[[int], bool]]:
    """A function that appends a token to the request's output, and returns whether another may follow. At the end of
    the ``with`` block all is as before."""
    settled = list(request.output_token_ids)
    grammar = request.grammar

    def extend(token: int) -> bool:
        request.output_token_ids.append(token)
        if grammar is None:
            return True
        try:
            return not grammar.consume(token)
        except GrammarError:  # as it will when the token is appended for good
            return False

    with ExitStack() as stack:
        if grammar is not None:
            stack.enter_context(grammar.trial(settled))
        try:
            yield extend
        finally:
            del request.output_token_ids[len(settled) :]
