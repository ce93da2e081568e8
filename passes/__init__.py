"""The passes, and the one list that says in which order they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .lower.pack_linears import pack_linears
from .recognise.eager_attention import recognise_eager_attention
from .recognise.masks import classify_masks
from .recognise.sdpa import recognise_sdpa
from .record import PassRecord, Rejection
from .rewrite.gather_logits import gather_logits
from .rewrite.paged_attention import insert_paged_cache
from .rewrite.positions import feed_positions
from .rewrite.rope_length import choose_rope_per_sequence
from .traced import TracedGraph, UnsupportedModel

__all__ = ["PASSES", "Pass", "PassRecord", "Rejection", "TracedGraph", "UnsupportedModel"]


@dataclass(frozen=True)
class Pass:
    """An entry of the pipeline.

    Attributes:
        name: what users write in ``passes={"skip": [name]}`` and reports show.
        apply: the pass; edits the graph in place.
        required: a paged program cannot be made without it, so the self-check's fallback never drops it.
        option: the boolean option that has to be on for it; "" for none.
    """

    name: str
    apply: Callable[[TracedGraph], PassRecord]
    required: bool = True
    option: str = ""


PASSES: tuple[Pass, ...] = (
    # Recognition first: everything after it looks at pagoda::attention only.
    Pass("recognise_sdpa", recognise_sdpa),
    Pass("recognise_eager_attention", recognise_eager_attention),
    # Needs attention nodes; must precede the cache, which takes no mask tensors.
    Pass("classify_masks", classify_masks),
    Pass("insert_paged_cache", insert_paged_cache),
    # After the masks are gone: what is left of position arithmetic feeds embeddings and rotary tables.
    Pass("choose_rope_per_sequence", choose_rope_per_sequence),
    Pass("feed_positions", feed_positions),
    # After these: it gives the logits a row axis of their own, which the passes above need not know.
    Pass("gather_logits", gather_logits, required=False),
    # Last: the passes above look for plain linears.
    Pass("pack_linears", pack_linears, required=False, option="pack_weights"),
)
