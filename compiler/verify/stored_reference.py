"""The model's own logits as plain data, kept with a program that is compared with them where there is no model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..store.typed_data import from_plain, to_plain
from .self_check import SHORT_SCHEDULE, Reference


@dataclass(frozen=True)
class StoredReference:
    """What a file holds of the model's own logits.

    Attributes:
        tokens: see ``Reference``, as for the others.
        logits: in the model's dtype.
        tolerance, share: by which the program was judged.
    """

    tokens: list[torch.Tensor]
    logits: list[torch.Tensor]
    tolerance: float
    share: float


def reference_data(reference: Reference) -> dict[str, Any]:
    """What a reference says of the sequences that are run after a load, in the model's own dtype."""
    short = reference.beginning(SHORT_SCHEDULE)
    judged = StoredReference(
        list(short.tokens), [rows.to(reference.dtype) for rows in short.logits], reference.tolerance, reference.share
    )
    plain: dict[str, Any] = to_plain(judged)
    return plain


def stored_reference(data: Any, vocab_size: int) -> Reference:
    """The reference of ``reference_data``.

    Raises:
        ValueError: it is none for a model with so many tokens.
    """
    judged: StoredReference = from_plain(StoredReference, data, "the reference")
    fits = len(judged.tokens) == len(judged.logits) == len(SHORT_SCHEDULE.lengths)
    for tokens, logits in zip(judged.tokens, judged.logits, strict=False):
        fits &= tokens.dtype is torch.int64 and tokens.dim() == 1 and logits.shape == (len(tokens), vocab_size)
        fits = (
            fits and len(tokens) > SHORT_SCHEDULE.decoded and bool((tokens >= 0).all() & (tokens < vocab_size).all())
        )
        fits = fits and logits.is_floating_point() and bool(logits.isfinite().all())
    if not fits or not (0 < judged.tolerance < math.inf and 0 < judged.share <= 1):
        raise ValueError("the reference is none for this program")
    logits = [rows.float() for rows in judged.logits]
    schedule = replace(SHORT_SCHEDULE, lengths=tuple(map(len, judged.tokens)))
    return Reference(judged.tokens, logits, judged.logits[0].dtype, schedule, judged.tolerance, judged.share)
