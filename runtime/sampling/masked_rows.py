"""Rows of logits whose next token a grammar restricts: their masks, and the choice where nothing else is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ops.structured import masked_argmax
from ..requests.request import Request
from ..requests.sampling_params import SamplingParams
from ..structured.masks import MaskPool


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The requests of a step that have a grammar.

    Attributes:
        chosen: tokens of those that take the likeliest one and ask for nothing else, by the request's place; -1 where
            there is none.
        masks: ``[S, W]`` int32, see ``MaskPool.fill``.
        places: the mask of each other request, by the request's place.
    """

    chosen: dict[int, int] = field(default_factory=dict)
    masks: Tensor | None = None
    places: dict[int, int] = field(default_factory=dict)

    def of(self, part: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Masks of the requests at these places, and where each of them stands among them; None: nobody has one."""
        rows = [row for row, i in enumerate(part) if i in self.places]
        if self.masks is None or not rows:
            return None
        device = self.masks.device
        places = torch.tensor([self.places[part[row]] for row in rows], device=device)
        return self.masks[places], torch.tensor(rows, device=device)


NO_MASKS = MaskedRows()


def choose_masked(pool: MaskPool, logits: Tensor, requests: Sequence[Request], taken: Sequence[int]) -> MaskedRows:
    """Make the masks of the requests that have a grammar, and choose where the likeliest token is all that is asked.

    Args:
        pool: room for the masks.
        logits: ``[R, V]``.
        requests: all of the step.
        taken: the row of each.
    """
    held = [i for i, r in enumerate(requests) if r.grammar is not None]
    held.sort(key=lambda i: not _takes_likeliest(requests[i].params))
    states = [grammar for i in held if (grammar := requests[i].grammar) is not None]
    masks = pool.fill(states, [_holds_eos(requests[i]) for i in held]).to(logits.device)
    count = sum(_takes_likeliest(requests[i].params) for i in held)
    rows = torch.tensor([taken[i] for i in held[:count]], dtype=torch.int64, device=logits.device)
    tokens = masked_argmax(logits, masks[:count], rows).tolist() if count else []
    places = {i: row for row, i in enumerate(held) if row >= count}
    return MaskedRows(dict(zip(held[:count], tokens, strict=True)), masks, places)


def _takes_likeliest(params: SamplingParams) -> bool:
    return params.is_greedy and not params.changes_logits and params.logprobs is None


def _holds_eos(request: Request) -> bool:
    return request.params.ignore_eos or request.num_output_tokens < request.params.min_tokens
