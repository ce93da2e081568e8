"""The model's own logits, kept with a program that is compared with them where there is no model."""

from __future__ import annotations

from dataclasses import replace

from ..verify.self_check import SHORT_SCHEDULE, Reference
from .restore import StoredReference


def to_stored(reference: Reference) -> StoredReference:
    """What a reference says of the sequences that are run after a load, in the model's own dtype."""
    short = reference.beginning(SHORT_SCHEDULE)
    logits = [rows.to(reference.dtype) for rows in short.logits]
    return StoredReference(list(short.tokens), logits, reference.tolerance, reference.share)


def from_stored(stored: StoredReference) -> Reference:
    """The reference of ``to_stored``."""
    schedule = replace(SHORT_SCHEDULE, lengths=tuple(map(len, stored.tokens)))
    logits = [rows.float() for rows in stored.logits]
    return Reference(stored.tokens, logits, stored.logits[0].dtype, schedule, stored.tolerance, stored.share)
