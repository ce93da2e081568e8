"""Findings for a model lowered for an Ascend NPU: routes, ATen operators left, the minimum time of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from ..compiler.costs.flops import flops, is_int8_product
from ..compiler.costs.traffic import Moved, Step, moved
from ..compiler.targets.npu.socs import Chip
from ..passes import PassRecord, TracedGraph
from ..passes.graph.fx_nodes import module_path
from ..passes.graph.provenance import DecoderLayers, launches_work, operator_name, source_line
from ..passes.graph.record import Route
from ..runtime.program import CacheSpec, StateSpec
from .npu_graph import GeReport
from .regions import UNSAID, Leftover, region, said_about
from .schedule import SchedulePlan
from .wording import alike

PREFILL_TOKENS = 1024
HALF = ("bfloat16", "float16")
"""The dtypes with a published peak."""
_BY_FORMULA = "aten"  # what a route is called that inserts a formula's operators


@dataclass(frozen=True)
class RouteSummary:
    """Sites that were lowered alike.

    Attributes:
        operator: the canonical operator, ``pagoda.rms_norm``.
        chosen: the replacement operators; "aten" for those of the reference implementation.
        refused: better operators that could not be used, each with the reason.
        modules: their modules, layers not distinguished.
        count: number of sites.
    """

    operator: str
    chosen: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Estimate:
    """The minimum time of one step of one sequence, from shapes and published figures; nothing is measured.

    Attributes:
        name: "decode" or "prefill".
        step: the computed step.
        moved: bytes that operators move.
        flops: operations of products and attention.
        memory_seconds: to read every weight and key once and write the new ones, at the memory's bandwidth. Excludes
            activations, which may stay on the chip. None if the bandwidth is unknown.
        compute_seconds: to do the operations at the chip's peak, int8 at twice that; None if it is unknown.
    """

    name: str
    step: Step
    moved: Moved
    flops: int
    memory_seconds: float | None
    compute_seconds: float | None

    @property
    def seconds(self) -> float | None:
        """The minimum time of the step; None if nothing is known."""
        known = [s for s in (self.memory_seconds, self.compute_seconds) if s is not None]
        return max(known, default=None)

    @property
    def bound_by(self) -> str:
        """The slower one of "memory" and "compute"; "" if one of them is unknown."""
        if self.memory_seconds is None or self.compute_seconds is None:
            return ""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"


@dataclass(frozen=True)
class NpuReport:
    """Findings for an NPU.

    Attributes:
        soc: the chip.
        chip: its published figures; None if there are none.
        block_size: tokens per block of the KV cache.
        dtype: compute dtype of the model, ``bfloat16``.
        routes: by operator, chosen and refused operators.
        graph: torchair's graph.
        estimates: for a decode and for a prefill step.
        schedule: plan of a second stream, early fetches and fused launches; None if not requested.
        no_static_decode: reason why decode steps have no static graphs on the graph engine; "" if they can.
        dtype_advice: see ``CompileReport``.
        cann: version of the CANN toolkit that it was lowered for.
    """

    soc: str
    chip: Chip | None
    block_size: int
    dtype: str
    routes: tuple[RouteSummary, ...]
    graph: GeReport
    estimates: tuple[Estimate, ...]
    no_static_decode: str = ""
    schedule: SchedulePlan | None = None
    dtype_advice: str = ""
    cann: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Ready for ``json.dump``."""
        return {
            "soc": self.soc,
            "cann": self.cann,
            "chip": None if self.chip is None else {**asdict(self.chip), "peak": self.chip.peak},
            "block_size": self.block_size,
            "dtype": self.dtype,
            "dtype_advice": self.dtype_advice,
            "routes": [
                {**asdict(r), "refused": [{"route": route, "reason": reason} for route, reason in r.refused]}
                for r in self.routes
            ],
            "graph": self.graph.to_dict(),
            "no_static_decode": self.no_static_decode,
            "schedule": None if self.schedule is None else asdict(self.schedule),
            "estimates": [{**asdict(e), "seconds": e.seconds, "bound_by": e.bound_by} for e in self.estimates],
        }


def route_summaries(records: Iterable[PassRecord]) -> tuple[RouteSummary, ...]:
    """The routes of all lowering passes, equal ones joined."""
    found: dict[tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]], list[str]] = {}
    for route in routes_of(records):
        chosen = route.chosen or (route.operator,)
        found.setdefault((route.operator, chosen, route.refused), []).append(route.module)
    return tuple(
        RouteSummary(*kind, tuple(dict.fromkeys(alike(module) for module in modules)), len(modules))
        for kind, modules in found.items()
    )


def routes_of(records: Iterable[PassRecord]) -> list[Route]:
    """Choices of the lowering passes, by site."""
    return [route for record in records for route in record.routes]


def npu_leftovers(traced: TracedGraph, layers: DecoderLayers, records: Sequence[PassRecord]) -> list[Leftover]:
    """ATen operators in the decoder layers that launch work, with the reasons.

    Args:
        traced: the lowered graph.
        layers: its decoder layers.
        records: reports of the passes.
    """
    by_module: dict[str, list[Route]] = {}
    for route in routes_of(records):
        by_module.setdefault(route.module, []).append(route)
    found = []
    for node, layer in layers.of.items():
        target = node.target
        if not launches_work(node) or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            continue
        module, part = module_path(node), region(node)
        reason = _reason_of_route(operator_name(node), by_module.get(module, []))
        if not reason and part in _KINDS_OF_PASSES:
            near_miss = said_about(part, node.name, module, records)
            reason = "" if near_miss == UNSAID else near_miss
        if not reason:
            line = source_line(node)
            reason = f"the model computes it: {line}" if line else "a pass inserted it"
        found.append(Leftover(operator_name(node), module, part or "other", layer, reason))
    return found


_KINDS_OF_PASSES = frozenset({"attention", "norm", "rope", "activation", "moe"})


def _reason_of_route(operator: str, routes: Sequence[Route]) -> str:
    """The reason why a module's routes contain an operator; "" if none does."""
    holding = [r for r in routes if operator in r.chosen] or [r for r in routes if _BY_FORMULA in r.chosen]
    refused = [pair for route in holding for pair in route.refused]
    if refused:
        return "; ".join(dict.fromkeys(f"{name.removeprefix('npu.')}: {reason}" for name, reason in refused))
    for route in holding:
        fused = [name.removeprefix("npu.") for name in route.chosen if name.startswith("npu.")]
        return f"in addition to {', '.join(fused)}" if fused else f"replaces {route.operator}"
    return ""


def computed_in(traced: TracedGraph) -> str:
    """The dtype of a graph's keys and values, also that of its products: ``bfloat16``."""
    cache = next((spec for spec in traced.caches if isinstance(spec, CacheSpec)), traced.caches[0])
    matrices = (t.dtype for t in traced.constants.values() if t.is_floating_point() and t.dim() > 1)
    is_other = cache.has_scales or isinstance(cache, StateSpec)
    return str(next(matrices, cache.dtype) if is_other else cache.dtype).removeprefix("torch.")


def estimates(
    traced: TracedGraph, layers: DecoderLayers, representatives: Sequence[int], chip: Chip | None, context: int
) -> tuple[Estimate, ...]:
    """The minimum time of a decode step with ``context`` tokens in the cache and of a prefill of ``PREFILL_TOKENS``.

    Args:
        traced: the lowered graph.
        layers: its decoder layers.
        representatives: for each layer of the whole model, the equal layer of the graph.
        chip: the chip; None if unknown.
        context: tokens, the decoded one included.
    """
    dtype = computed_in(traced)
    bandwidth = None if chip is None else chip.bandwidth
    peak = chip.peak if chip is not None and dtype in HALF else None
    outside = [n for n in traced.graph.nodes if n not in layers.of]
    times = Counter(representatives)
    found = []
    for name, step in (
        ("decode", Step(1, context, 1)),
        ("prefill", Step(PREFILL_TOKENS, PREFILL_TOKENS, 1)),
    ):
        total, operations = moved(traced, outside, step), flops(traced, outside, step)
        spared = _spared(traced, outside, step)
        for layer in range(len(layers.paths)):
            nodes = layers.nodes(layer)
            total += moved(traced, nodes, step) * times[layer]
            operations += flops(traced, nodes, step) * times[layer]
            spared += _spared(traced, nodes, step) * times[layer]
        memory = None if bandwidth is None else (total.weights + total.cache) / bandwidth
        compute = None if peak is None else (operations - spared) / peak
        found.append(Estimate(name, step, total, operations, memory, compute))
    return tuple(found)


def _spared(traced: TracedGraph, nodes: Iterable[fx.Node], step: Step) -> float:
    """The operations that int8 products save: a cube core does twice as many of them per cycle."""
    return flops(traced, [node for node in nodes if is_int8_product(node)], step) / 2
