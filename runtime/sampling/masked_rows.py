"""Rows of logits whose next token a grammar restricts: their masks, and the fast path for plain argmax."""

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
    """Grammar masks and choices of one step's requests.

    Attributes:
        chosen: by request index, the token of each request with a grammar that takes the argmax and requests nothing
            else; -1 for the others.
        masks: ``[S, W]`` int32, see ``MaskPool.fill``.
        places: by request index, the mask of each other request with a grammar.
    """

    chosen: dict[int, int] = field(default_factory=dict)
    masks: Tensor | None = None
    places: dict[int, int] = field(default_factory=dict)

    def of(self, part: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Return the masks of the requests at these indices, and their positions in ``part``; None without masks."""
        rows = [row for row, i in enumerate(part) if i in self.places]
        if self.masks is None or not rows:
            return None
        device = self.masks.device
        places = torch.tensor([self.places[part[row]] for row in rows], device=device)
        return self.masks[places], torch.tensor(rows, device=device)


NO_MASKS = MaskedRows()


def choose_masked(pool: MaskPool, logits: Tensor, requests: Sequence[Request], taken: Sequence[int]) -> MaskedRows:
    """Make the masks of requests with a grammar, and choose at once for those that need only the argmax.

    Args:
        pool: buffer for the masks.
        logits: ``[R, V]``.
        requests: all requests of the step.
        taken: row index of each request.
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
