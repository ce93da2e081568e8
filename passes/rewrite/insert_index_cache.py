"""Give every indexer a paged cache of its keys.

Matches:
    pagoda::lightning_indexer_seq(query, key, weights, topk, scale)          # in a flat [1, T] step
Becomes:
    pagoda::lightning_indexer(query, key, weights, topk, scale, key_cache_i, slot_mapping, block_table, ...)
Why it is faster:
    the keys of earlier tokens are read from the cache instead of being computed again.

The keys lie in the blocks of the layers that look back without limit: as many tokens, under the same numbers. They
are never rounded to integers, which would choose other keys.

Level 0.
"""

from __future__ import annotations

from torch import fx

from ...runtime.cache.cache_specs import num_token_groups, token_specs
from ...runtime.ops.attention.lightning_indexer import lightning_indexer, lightning_indexer_seq
from ...runtime.program import CacheSpec
from ...runtime.step_metadata import GROUP_FIELDS
from ..graph.fx_nodes import is_dynamic, shape, value
from ..graph.record import PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph


def insert_index_cache(traced: TracedGraph) -> PassRecord:
    """Replace every indexer over one whole sequence by the one that reads a cache."""
    caches: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def step(node: fx.Node) -> str | None:
        if node.target is not lightning_indexer_seq:
            return None
        query, key = node.args[:2]
        if not is_dynamic(shape(query)[1]):
            return f"its number of tokens is fixed at {shape(query)[1]}"
        group = _group(traced)
        if key not in caches:
            dim = int(shape(key)[2])
            caches[key] = traced.add_cache(CacheSpec(1, dim, 0, value(key).dtype, group=group))  # type: ignore[index]
        metadata = [
            *(traced.step_input(field, group) for field in GROUP_FIELDS),
            *(traced.step_input(field) for field in ("query_start_loc", "seq_lens")),
        ]
        with traced.before(node):
            new = traced.call(lightning_indexer, *node.args, *caches[key], *metadata)  # type: ignore[index]
        traced.substitute(node, new)
        return ""

    record = rewrite_each(traced, "insert_index_cache", step, list(traced.graph.nodes) if traced.paged else ())
    if record.matches:
        traced.number_caches()
    return record


def _group(traced: TracedGraph) -> int:
    """The group of the layers that look back without limit; a new one where there are none."""
    found = [spec.group for spec in token_specs(traced.caches) if not spec.sliding_window]
    return found[0] if found else (num_token_groups(traced.caches) if traced.caches else 0)
