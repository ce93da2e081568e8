"""Shares of several ranks in one model: the weights that each holds, and what they exchange in a step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

from ...passes import PassRecord, TracedGraph
from ...passes.graph.fx_nodes import callee, module_path, shape, value
from ...passes.graph.provenance import decoder_layers
from ...passes.sharding.experts import expert_groups
from ...runtime.cache.cache_specs import AnySpec, bytes_per_block, bytes_per_slot
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.program import CacheSpec
from .layer_caches import all_caches
from .traffic import Sizes, Step

COLLECTIVES = {
    torch.ops.pagoda.all_reduce.default: "all_reduce",
    torch.ops.pagoda.all_gather.default: "all_gather",
}
_moe = torch.ops.pagoda.moe.default
OUTSIDE = -1
"""The layer of what belongs to none."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class WholeWeight:
    """A weight that every rank holds whole.

    Attributes:
        module: that reads it first.
        shape: its sizes.
        size: its bytes.
        count: number of layers that have one like it.
        reason: why it is not cut.
    """

    module: str
    shape: tuple[int, ...]
    size: int
    count: int
    reason: str


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind.

    Attributes:
        operator: "all_reduce" or "all_gather".
        count: number of them in a step.
        decode_bytes: of their results on each rank, in a decode step of one sequence.
        prompt_bytes: what each further token of a prompt adds.
    """

    operator: str
    count: int
    decode_bytes: int
    prompt_bytes: int


@dataclass(frozen=True)
class RankShares:
    """The part that each of several ranks has in a model.

    Attributes:
        ranks: number of them.
        weight_bytes: of the whole model; of quantized weights as the checkpoint stores them.
        rank_weight_bytes: of each rank, weights that are held whole among them.
        are_stored: some of the weights are quantized.
        whole: weights that every rank holds whole, the largest first.
        exchanges: collectives of a step, by kind.
        experts: routed experts of the model's layers, by number: those that each rank holds, and of how many ranks
            each is cut over.
        kv_heads: KV heads of the model's layers with a cache, by number: those that each rank holds.
        token_bytes: keys and values of one token on each rank, in all layers.
        whole_token_bytes: those of the whole model.
        state_bytes: state of one sequence on each rank.
        whole_state_bytes: that of the whole model.
    """

    ranks: int
    weight_bytes: int
    rank_weight_bytes: int
    are_stored: bool
    whole: tuple[WholeWeight, ...]
    exchanges: tuple[Exchange, ...]
    experts: dict[int, tuple[int, int]]
    kv_heads: dict[int, int]
    token_bytes: int
    whole_token_bytes: int
    state_bytes: int
    whole_state_bytes: int

    @property
    def even_share(self) -> float:
        """Bytes of each rank's weights, divided by the bytes of an even part."""
        return self.rank_weight_bytes * self.ranks / max(1, self.weight_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Ready for ``json.dump``."""
        return {**asdict(self), "even_share": round(self.even_share, 4)}


def rank_shares(
    unsharded: TracedGraph,
    sharded: TracedGraph,
    records: Sequence[PassRecord],
    representatives: Sequence[int],
    lowered: TracedGraph,
) -> RankShares:
    """Compare one rank's graph with that of the whole model.

    Args:
        unsharded: the graph in front of the passes that cut it.
        sharded: the graph of a rank behind them.
        records: of these passes.
        representatives: for each layer of the whole model, the layer of the graphs that is like it.
        lowered: the rank's finished graph, which may store less in its caches.
    """
    weights, held = _weights(unsharded, representatives), _weights(sharded, representatives)
    before, after = _caches(*(all_caches(traced, representatives) for traced in (unsharded, sharded, lowered)))
    return RankShares(
        ranks=sharded.ranks,
        weight_bytes=sum(weight.size * weight.count for weight in weights.values()),
        rank_weight_bytes=sum(weight.size * weight.count for weight in held.values()),
        are_stored=any(isinstance(tensor, StoredWeight) for tensor in sharded.constants.values()),
        whole=_whole([weight for name, weight in held.items() if name not in sharded.notes.parts], records),
        exchanges=_exchanges(sharded, representatives),
        experts=_experts(unsharded, sharded),
        kv_heads={
            a.num_kv_heads: b.num_kv_heads
            for a, b in zip(before, after, strict=True)
            if isinstance(a, CacheSpec) and isinstance(b, CacheSpec)
        },
        token_bytes=bytes_per_block(after, 1),
        whole_token_bytes=bytes_per_block(before, 1),
        state_bytes=bytes_per_slot(after),
        whole_state_bytes=bytes_per_slot(before),
    )


def _experts(unsharded: TracedGraph, sharded: TracedGraph) -> dict[int, tuple[int, int]]:
    calls = [[node.args[3] for node in t.graph.nodes if node.target is _moe] for t in (unsharded, sharded)]
    found = {}
    for whole, part in zip(*calls, strict=True):
        count, held = int(shape(whole)[0]), int(shape(part)[0])
        is_cut = part.name in sharded.notes.parts
        found[count] = held, sharded.ranks // expert_groups(sharded, count) if is_cut else 1
    return found


def _caches(
    whole: Sequence[AnySpec], parts: Sequence[AnySpec], lowered: Sequence[AnySpec]
) -> tuple[list[AnySpec], list[AnySpec]]:
    """Caches of the whole model and of a rank, as its finished graph stores them.

    Latents, which replace the keys and values of all heads, are the same on every rank.
    """
    before: list[AnySpec] = []
    for given, part, kept in zip(whole, parts, lowered, strict=True):
        if not isinstance(kept, CacheSpec) or not isinstance(part, CacheSpec) or not isinstance(given, CacheSpec):
            before.append(given)
        elif kept.num_kv_heads == part.num_kv_heads:
            before.append(replace(kept, num_kv_heads=given.num_kv_heads))
        else:
            before.append(kept)
    return before, [kept if isinstance(kept, CacheSpec) else part for part, kept in zip(parts, lowered, strict=True)]


def _weights(traced: TracedGraph, representatives: Sequence[int]) -> dict[str, WholeWeight]:
    """The weights that a graph reads, by the name of their input; each tensor once."""
    of, times = _layers(traced, representatives)
    found: dict[str, WholeWeight] = {}
    seen = set()
    for node in traced.placeholders:
        tensor = traced.constants.get(node.name)
        if tensor is None or not node.users:
            continue
        if not isinstance(tensor, StoredWeight):
            key = tensor.data_ptr(), tensor.shape, tensor.stride()
            if key in seen:
                continue
            seen.add(key)
        size = tensor.stored_bytes if isinstance(tensor, StoredWeight) else tensor.numel() * tensor.element_size()
        reader = next(iter(node.users))
        layer = of.get(reader, OUTSIDE)
        sizes = tuple(map(int, shape(node)))
        reason = "read as a whole" if callee(reader) == "linear" else f"{callee(reader)} reads it"
        found[node.name] = WholeWeight(module_path(reader), sizes, size, times[layer], reason)
    return found


def _layers(traced: TracedGraph, representatives: Sequence[int]) -> tuple[Mapping[fx.Node, int], Counter[int]]:
    """The layer of each node, and how many layers of the whole model each one stands for."""
    layers = decoder_layers(traced.graph)
    alike = len(layers.paths) == max(representatives, default=-1) + 1
    times = Counter(representatives if alike else range(len(layers.paths)))
    times[OUTSIDE] = 1
    return layers.of, times


def _whole(weights: Sequence[WholeWeight], records: Sequence[PassRecord]) -> tuple[WholeWeight, ...]:
    """Weights of layers that are alike as one, the largest first, with the reason that a pass gave."""
    reasons = {_NUMBER.sub("*", r.module): r.reason for record in records for r in record.rejections}
    found: dict[tuple[str, tuple[int, ...]], WholeWeight] = {}
    for weight in weights:
        module = _NUMBER.sub("*", weight.module)
        # Where the linear that closes a part of a layer is refused, those before it stay whole, too.
        beside = (reason for name, reason in reasons.items() if name.rpartition(".")[0] == module.rpartition(".")[0])
        reason = reasons.get(module) or next(beside, weight.reason)
        known = found.get((module, weight.shape))
        count = weight.count + (known.count if known else 0)
        found[module, weight.shape] = replace(weight, module=module, count=count, reason=reason)
    return tuple(sorted(found.values(), key=lambda weight: -weight.size * weight.count))


def _exchanges(traced: TracedGraph, representatives: Sequence[int]) -> tuple[Exchange, ...]:
    of, times = _layers(traced, representatives)
    steps = [Sizes(traced, Step(tokens, tokens, 1)) for tokens in (1, 2)]
    found: dict[str, Exchange] = {}
    for node in traced.graph.nodes:
        if node.target in COLLECTIVES:
            name, count = COLLECTIVES[node.target], times[of.get(node, OUTSIDE)]
            one, two = (count * sizes.stored_bytes(value(node)) for sizes in steps)
            known = found.get(name, Exchange(name, 0, 0, 0))
            found[name] = Exchange(
                name, known.count + count, known.decode_bytes + one, known.prompt_bytes + two - one
            )
    return tuple(found.values())
