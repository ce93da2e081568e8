"""Findings of ``explain`` as data, and as a dict."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..compiler.costs.rank_shares import RankShares
from ..compiler.costs.stage_shares import StageShares
from ..compiler.costs.traffic import Traffic
from ..compiler.report import Verdict
from ..passes.graph.record import titled
from .drawing import LayerGraph
from .drop_in import DropIn
from .npu import NpuReport
from .recognition import Recognition
from .regions import Leftover
from .wording import in_runs


@dataclass(frozen=True)
class NearMiss:
    """A site that a pass examined and did not rewrite.

    Attributes:
        module: qualified name of the module, "" when unknown.
        reason: one line.
        node: name of the graph node.
    """

    module: str
    reason: str
    node: str


@dataclass(frozen=True)
class PassSummary:
    """One pass of the pipeline.

    Attributes:
        name: as in the pipeline list.
        level: lowest ``opt_level`` that runs it; -1: not in the pipeline list.
        matches: sites that it rewrote.
        expected: number of sites by provenance; None for passes that rewrite recognized operators.
        expected_per_layer: the same, the maximum over decoder layers.
        near_misses: sites that it did not rewrite.
        seconds: wall time.
        dropped: reason why the self-check dropped it; "" if it did not.
        place: as in the pipeline list.
    """

    name: str
    level: int
    matches: int
    expected: int | None
    expected_per_layer: int | None
    near_misses: tuple[NearMiss, ...]
    seconds: float
    dropped: str = ""
    place: str = ""

    @property
    def title(self) -> str:
        """Name and position, as reports show them."""
        return titled(self.name, self.place)


@dataclass(frozen=True)
class LayerSummary:
    """One decoder layer.

    Attributes:
        index: index of the layer.
        path: qualified name.
        operators_before: operators that launch work in the unmodified model, in order.
        operators_after: those of the lowered graph.
        traffic_before: bytes that they move.
        traffic_after: bytes that they move.
        expected: number of norms, rotary embeddings, ... in the unmodified layer.
    """

    index: int
    path: str
    operators_before: tuple[str, ...]
    operators_after: tuple[str, ...]
    traffic_before: Traffic
    traffic_after: Traffic
    expected: dict[str, int]


@dataclass(frozen=True)
class TargetGraph:
    """The whole lowered graph.

    Attributes:
        operators: number of each operator that launches work.
        launches_per_layer: maximum operators per decoder layer; None if nothing was lowered.
        cache_copies: copies of a whole key or value cache.
        token_bytes: keys and values of one token, in all layers of the model.
        state_bytes: state of one sequence, likewise; 0 if the model has none.
    """

    operators: dict[str, int]
    launches_per_layer: int | None
    cache_copies: int
    token_bytes: int
    state_bytes: int


@dataclass
class Findings:
    """All findings about compiling a model.

    Attributes:
        model: class name.
        target: the target.
        opt_level: the requested level.
        passes: in order.
        layers: all decoder layers of the model.
        recognized: by kind, the number in the model and how many were recognized.
        leftovers: operators that passes should have rewritten; for an NPU, all ATen operators left in decoder layers.
        target_graph: the lowered graph as a whole.
        drop_in: graph breaks and recompiles.
        verdict: result of the self-check; None if it was off or had nothing to check.
        refused: reason why the model cannot be served paged; "" if it can. If set, everything derived from the
            lowered graph is empty.
        seconds: wall time by phase.
        drawings: per layer, the operators before and after as graphs.
        npu: findings for an NPU; None for another target or an unsupported model.
        built_layers: number of decoder layers that were built to represent all (see ``Skeleton``); None for a whole
            model.
        stages: what the stages of a pipeline hold; None without them, or for an unsupported model.
        shares: the part of each of several ranks; None for one, or for an unsupported model.
    """

    model: str
    target: str
    opt_level: int
    passes: list[PassSummary]
    layers: list[LayerSummary]
    recognized: list[Recognition]
    leftovers: list[Leftover]
    target_graph: TargetGraph
    drop_in: DropIn
    verdict: Verdict | None
    refused: str
    seconds: dict[str, float]
    drawings: list[tuple[LayerGraph, LayerGraph]] = field(default_factory=list)
    npu: NpuReport | None = None
    built_layers: int | None = None
    shares: RankShares | None = None
    stages: StageShares | None = None

    @property
    def launches_before(self) -> int:
        """Maximum operators per decoder layer of the unmodified model."""
        return max((len(layer.operators_before) for layer in self.layers), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Everything except the drawings, ready for ``json.dump``."""
        return {
            "model": self.model,
            "target": self.target,
            "opt_level": self.opt_level,
            "passes": [_pass_dict(p) for p in self.passes],
            "layers": [_layer_dict(layer) for layer in self.layers],
            "leftovers": [asdict(leftover) for leftover in self.leftovers],
            "target_graph": asdict(self.target_graph),
            "launches_per_layer_before": self.launches_before,
            "recognized": {
                r.kind: {"expected": r.expected, "matched": r.matched, "missed": [asdict(m) for m in r.missed]}
                for r in self.recognized
            },
            "dropped_passes": [{"name": p.name, "reason": p.dropped} for p in self.passes if p.dropped],
            "graph_breaks": self.drop_in.graph_breaks,
            "recompiles": self.drop_in.recompiles,
            "drop_in": asdict(self.drop_in),
            "verdict": None if self.verdict is None else _verdict_dict(self.verdict),
            "refused": self.refused,
            "built_layers": self.built_layers,
            "stages": None if self.stages is None else self.stages.to_dict(),
            "ranks": None if self.shares is None else self.shares.to_dict(),
            "npu": None if self.npu is None else self.npu.to_dict(),
            "seconds": {phase: round(seconds, 4) for phase, seconds in self.seconds.items()},
        }


def groups_of_layers(layers: Iterable[LayerSummary]) -> list[tuple[str, LayerSummary]]:
    """Layers with equal operators: their indices, and the first layer."""
    groups: dict[Hashable, list[LayerSummary]] = {}
    for layer in layers:
        key = (layer.operators_before, layer.operators_after, layer.traffic_before, layer.traffic_after)
        groups.setdefault(key, []).append(layer)
    return [(in_runs(layer.index for layer in group), group[0]) for group in groups.values()]


def _pass_dict(summary: PassSummary) -> dict[str, Any]:
    plain = asdict(summary)
    plain["near_misses"] = [asdict(miss) for miss in summary.near_misses]
    plain["seconds"] = round(summary.seconds, 6)
    return plain


def _layer_dict(layer: LayerSummary) -> dict[str, Any]:
    return {
        "index": layer.index,
        "path": layer.path,
        "operators_before": list(layer.operators_before),
        "operators_after": list(layer.operators_after),
        "bytes_per_token_before": round(layer.traffic_before.per_token),
        "bytes_per_token_after": round(layer.traffic_after.per_token),
        "weight_bytes_before": layer.traffic_before.weights,
        "weight_bytes_after": layer.traffic_after.weights,
        "expected": dict(layer.expected),
    }


def _verdict_dict(verdict: Verdict) -> dict[str, Any]:
    plain = asdict(verdict)
    plain["error"] = verdict.error if math.isfinite(verdict.error) else None
    return plain
