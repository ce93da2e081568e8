"""Whether what a file says about a graph's inputs fits the graph, and the tensors that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch

from ...runtime.cache.cache_specs import num_token_groups
from ...runtime.program import STATE_NAMES, CacheSpec, StateSpec, is_cache_input
from ...runtime.step_metadata import GROUP_FIELDS, StepMetadata
from ..link.linkage import Linkage

_LARGEST = 1 << 24
"""Heads, sizes of heads, positions, columns of logits: none is larger."""
_STEP_FIELDS = {f.name for f in fields(StepMetadata)} - {"groups"}
_CACHED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8)


def check_linkage(linkage: Linkage, placeholders: Sequence[str], constants: Mapping[str, torch.Tensor]) -> None:
    """Compare a linkage with a graph.

    Args:
        linkage: what the graph's inputs receive; its types are right.
        placeholders: names of the graph's inputs, in order.
        constants: input → tensor, without merged ones.

    Raises:
        ValueError: an input receives nothing, or two things, or something is out of its bounds.
    """
    _require(linkage.inputs == tuple(placeholders), "its inputs are not the graph's")
    for i, spec in enumerate(linkage.caches):
        _check_cache(i, spec, len(linkage.caches))
    groups = num_token_groups(linkage.caches)
    states = {spec.group for spec in linkage.caches if isinstance(spec, StateSpec)}
    _require(states <= {groups}, f"its states are of groups {sorted(states)}, those of keys and values are {groups}")
    known = _STEP_FIELDS | {f"{name}_{g}" for name in GROUP_FIELDS for g in range(1, groups)}
    for name in linkage.step_inputs:
        _require(name in known, f"a step has no {name!r}")
    caches = {f"{part.name}_{i}" for i, spec in enumerate(linkage.caches) for part in spec.parts()}
    _require(caches == {name for name in linkage.inputs if is_cache_input(name)}, "its caches are not the graph's")
    given = [linkage.input_ids, *filter(None, [linkage.position_ids]), *linkage.step_inputs, *linkage.token_counts]
    given += [*caches, *constants, *linkage.merged]
    _require(sorted(given) == sorted(linkage.inputs), "an input receives nothing, or two things")
    inputs = set(linkage.inputs)
    _require(linkage.read <= inputs, "it reads what is not an input")
    for name, sources in linkage.merged.items():
        _check_rows(name, [constants[source] for source in sources if source in constants], len(sources))
    weights = constants.keys() | linkage.merged.keys()
    for packed in linkage.packed:
        _require({packed.name, *packed.sources} <= weights, f"{packed.name} is packed, and no weight")
    _require(constants.keys() >= set(linkage.folded), "constants were computed from what is not a constant")
    _require(0 < linkage.vocab_size <= _LARGEST, f"it has {linkage.vocab_size} columns of logits")
    positions = linkage.max_model_len
    _require(positions is None or positions > 0, f"it has {positions} positions")
    for length in (linkage.rope_switch, linkage.restart_length):
        _require(length is None or 0 < length <= _LARGEST, f"its keys change beyond {length} tokens")
    _require(linkage.block_size is None, "programs for a CPU take blocks of any size")


def _check_cache(i: int, spec: CacheSpec | StateSpec, count: int) -> None:
    _require(0 <= spec.group < count, f"cache {i} is of group {spec.group}")
    _require(spec.dtype in _CACHED, f"cache {i} holds {spec.dtype}")
    if isinstance(spec, StateSpec):
        _require(spec.name in STATE_NAMES, f"cache {i} is called {spec.name!r:.40}")
        _require(
            0 < len(spec.shape) <= 4 and all(0 < size <= _LARGEST for size in spec.shape),
            f"cache {i} has a state of {spec.shape!r:.60}",
        )
        return
    sizes = (spec.num_kv_heads, spec.key_dim, spec.value_dim)
    least = (1, 1, 1 if spec.has_scales else 0)  # an indexer has keys alone, which are not rounded to integers
    _require(
        all(low <= size <= _LARGEST for low, size in zip(least, sizes, strict=True)),
        f"cache {i} has heads and sizes {sizes}",
    )
    _require(spec.sliding_window >= 0, f"cache {i} has a window of {spec.sliding_window}")


def _check_rows(name: str, tensors: Sequence[torch.Tensor], count: int) -> None:
    _require(0 < count == len(tensors), f"{name} is merged of what is not a tensor")
    alike = {(tensor.dtype, tensor.shape[1:], tensor.dim() > 0 and tensor.is_contiguous()) for tensor in tensors}
    _require(len(alike) == 1 and next(iter(alike))[2], f"{name} is merged of tensors that are not its rows")


def _require(right: bool, wrong: str) -> None:
    if not right:
        raise ValueError(wrong)
