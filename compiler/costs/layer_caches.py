"""The caches of a whole model, from the graph of a few of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import cache_index
from ...passes.graph.provenance import decoder_layers
from ...runtime.program import CacheSpec, StateSpec


def all_caches(traced: TracedGraph, representatives: Sequence[int]) -> tuple[CacheSpec | StateSpec, ...]:
    """The caches of all layers, from those of the layers that stand for them.

    A cache that several layers read belongs to the first of them.
    """
    layers = decoder_layers(traced.graph)
    first_reader: dict[int, int] = {}
    for node in traced.graph.nodes:
        for read in node.all_input_nodes:
            if (cache := cache_index(read)) is not None:
                first_reader.setdefault(cache, layers.of.get(node, -1))
    if len(layers.paths) != max(representatives, default=-1) + 1:
        return tuple(traced.caches)  # layers in two lists: nothing was left out
    of_layer: dict[int, list[CacheSpec | StateSpec]] = {}
    for cache, spec in enumerate(traced.caches):
        of_layer.setdefault(first_reader.get(cache, -1), []).append(spec)
    outside = of_layer.get(-1, [])
    specs = (*outside, *(spec for like in representatives for spec in of_layer.get(like, ())))
    if not any(spec.group for spec in specs):
        return specs
    # Numbered as they come in the whole model.
    windows = list(dict.fromkeys(spec.sliding_window for spec in specs if isinstance(spec, CacheSpec)))
    return tuple(
        replace(spec, group=windows.index(spec.sliding_window) if isinstance(spec, CacheSpec) else len(windows))
        for spec in specs
    )
