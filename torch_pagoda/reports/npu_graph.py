"""The graph that the real torchair makes of a lowered model, in a Python process with the offline toolchain."""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..compiler.costs.skeleton import Skeleton, build_skeleton
from ..compiler.options import CompileOptions
from ..compiler.targets.npu.flat_graph import cache_inputs
from ..compiler.targets.npu.ge.static_graph import why_not_static
from ..compiler.targets.npu.without_device import is_offline
from ..npu_tools.offline.ge_graph import GeGraph
from ..npu_tools.offline.run import call_offline
from ..npu_tools.offline.toolchain import ToolchainError, find_toolchain
from ..passes import TracedGraph, UnsupportedModel
from ..passes.graph.fx_nodes import value
from ..passes.graph.provenance import DecoderLayers, decoder_layers
from ..passes.lower.npu.decode_graph import decode_graph_or_reason
from ..runtime.ops.collectives import GROUP
from ..runtime.phases import phase
from ..runtime.program import is_cache_input
from .stored_formats import Formats, marks_of_layers, store_as, stored_formats


@dataclass(frozen=True)
class GeLayer:
    """Equal decoder layers of a GE graph.

    Attributes:
        layers: their indices in the whole model.
        types: Ascend IR operators that launch a kernel, with their counts.
    """

    layers: tuple[int, ...]
    types: dict[str, int]

    @property
    def launches(self) -> int:
        """Kernels per layer."""
        return sum(self.types.values())


@dataclass(frozen=True)
class GeSchedule:
    """Operators of a GE graph with the same schedule.

    Attributes:
        attributes: name in GE, such as ``_user_stream_label`` → value.
        types: operators that launch a kernel, with their counts in the converted layers.
    """

    attributes: dict[str, Any]
    types: dict[str, int]


@dataclass(frozen=True)
class GeReport:
    """A summary of a GE graph.

    Attributes:
        unavailable: reason why there is none, with the remedy; "" if there is one. If set, all else is empty.
        converted: number of decoder layers in the graph; they represent all of the model's.
        layers: by kind.
        per_step: operators that launch a kernel once per step, outside of the layers.
        cache_copies: nodes that copy a whole key or value cache in every step; there should be none.
        schedules: schedules of operators in the graph, with their counts.
        decode: fields of ``GraphCounts`` of the graph, and of the static graph for decode steps; () without one.
        other_steps: if decode steps have a graph of their own, described by all of the above: maximum kernels per
            layer in the graph of other steps; else None.
    """

    unavailable: str = ""
    converted: int = 0
    layers: tuple[GeLayer, ...] = ()
    per_step: dict[str, int] = field(default_factory=dict)
    cache_copies: tuple[str, ...] = ()
    schedules: tuple[GeSchedule, ...] = ()
    decode: tuple[dict[str, int], ...] = ()
    other_steps: int | None = None

    @property
    def launches_per_layer(self) -> int | None:
        """Maximum kernels per layer; None if nothing was converted."""
        return max((layer.launches for layer in self.layers), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Ready for ``json.dump``."""
        layers = [{**asdict(layer), "launches": layer.launches} for layer in self.layers]
        return {**asdict(self), "layers": layers, "launches_per_layer": self.launches_per_layer}


@phase("torchair")
def graph_engine_report(model: nn.Module, representatives: Sequence[int], options: CompileOptions) -> GeReport:
    """Convert a model with the real torchair; the model is built from its configuration, without values, its weights
    in the formats of the quantized checkpoint.

    Downloads nothing. Takes about half a minute, most of it in another process.

    Args:
        model: a transformers model.
        representatives: for each layer of the whole model, the equal layer of ``model``.
        options: options of lowering.
    """
    from transformers import PreTrainedModel

    kind = type(model)
    if not isinstance(model, PreTrainedModel) or kind.__module__.split(".")[0] != "transformers":
        return GeReport(f"{kind.__name__} is not a transformers class, so another process cannot build it")
    if options.patterns:
        return GeReport("patterns are functions, which cannot be sent to another process")
    if not is_offline():
        try:
            find_toolchain()
        except ToolchainError as error:
            return GeReport(str(error))
    formats = stored_formats(model)
    with tempfile.TemporaryDirectory(prefix="pagoda_config_") as folder:
        model.config.save_pretrained(folder)
        try:
            found = call_offline(
                f"{__name__}:convert_configuration",
                folder=folder,
                kind=f"{kind.__module__}:{kind.__name__}",
                dtype=str(model.dtype).removeprefix("torch."),
                soc=options.npu_target().soc,
                cann=options.npu_target().cann,
                block_size=options.block_size,
                opt_level=options.opt_level,
                passes={name: list(names) for name, names in options.passes.items()},
                quantization=options.quantization,
                group_size=options.group_size,
                kv_cache_dtype=options.kv_cache_dtype,
                input_bits=options.input_bits,
                ranks=options.tensor_parallel_size,
                expert_groups=options.expert_parallel_size,
                formats=formats,
                marks=marks_of_layers(model, formats),
            )
        except (RuntimeError, ValueError) as error:  # of the function itself, where it runs in this process
            return GeReport(f"could not convert the graph: {error}")
    return _report(found, representatives)


def _report(found: Mapping[str, Any], representatives: Sequence[int]) -> GeReport:
    """Join the converted layers and the layers that they represent."""
    numbers: dict[int, list[int]] = {}
    for number, layer in enumerate(representatives):
        numbers.setdefault(found["representatives"][layer], []).append(number)
    kinds: dict[frozenset[tuple[str, int]], tuple[dict[str, int], list[int]]] = {}
    for layer, types in enumerate(found["layers"]):
        _, of = kinds.setdefault(frozenset(types.items()), (types, []))
        of.extend(numbers.get(layer, []))
    layers = tuple(GeLayer(tuple(sorted(of)), types) for types, of in kinds.values())
    schedules = tuple(GeSchedule(attributes, types) for attributes, types in found["schedules"])
    copies, decode = tuple(found["cache_copies"]), tuple(found["decode"])
    other = found["other_steps"]
    return GeReport("", len(found["layers"]), layers, found["per_step"], copies, schedules, decode, other)


def convert_configuration(
    folder: str,
    kind: str,
    dtype: str,
    soc: str,
    cann: str,
    block_size: int,
    opt_level: int,
    passes: Mapping[str, Sequence[str]],
    quantization: str | None = None,
    group_size: int | None = None,
    kv_cache_dtype: str = "auto",
    input_bits: int | None = None,
    ranks: int = 1,
    expert_groups: int | None = None,
    formats: Formats | None = None,
    marks: Sequence[str] = (),
) -> dict[str, Any]:
    """Build, lower and convert a model; for ``call_offline``.

    Args:
        folder: folder with the config.json.
        kind: the model's class, ``module:name``.
        dtype: dtype of its weights, ``bfloat16``.
        soc, cann, block_size, opt_level, passes, quantization, group_size, kv_cache_dtype, input_bits: as in
            ``CompileOptions``.
        ranks: how many hold each layer together; the graph is that of one.
        expert_groups: ``CompileOptions.expert_parallel_size``.
        formats: formats of its stored weights.
        marks: per decoder layer, what distinguishes it in addition to its configuration; () for nothing.

    Returns:
        ``layers``: per decoder layer, operators with counts, in graph order; ``per_step``: of the rest;
        ``representatives``: as in ``Skeleton``; ``cache_copies``: names of nodes; ``schedules``: pairs of attributes
        and operators with counts; ``decode`` and ``other_steps``: as in ``GeReport``.

    Raises:
        UnsupportedModel: the model cannot be served paged.
        ConversionError: a node has no GE form.
    """
    from transformers import AutoConfig

    from ..compiler.capture.trace import capture
    from ..compiler.pipeline import run_pipeline
    from ..compiler.report import CompileReport
    from ..npu_tools.offline.conversion import convert

    module, _, name = kind.partition(":")
    options = CompileOptions(
        opt_level,
        dict(passes),
        verify="off",
        codegen="none",
        target="npu",
        soc=soc,
        cann=cann,
        block_size=block_size,
        quantization=quantization,
        group_size=group_size,
        kv_cache_dtype=kv_cache_dtype,
        input_bits=input_bits,
        tensor_parallel_size=ranks,
        expert_parallel_size=expert_groups,
    )
    config = AutoConfig.from_pretrained(folder)
    built = getattr(importlib.import_module(module), name)
    skeleton: Skeleton = build_skeleton(built, config, getattr(torch, dtype), marks)
    store_as(skeleton.model, formats or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever asks has captured the model too, and has seen them
        captured = capture(skeleton.model)
        known = decoder_layers(captured.traced.graph)
        traced = run_pipeline(captured, options, None, CompileReport(name))
        decode, _ = decode_graph_or_reason(traced)
        kinds = [traced] if decode is None else [decode, traced]
        stand_for_ranks(ranks)
        graphs = [convert(each.module, [value(node) for node in each.placeholders], soc=soc) for each in kinds]
    counted = [_launches(each, known, graph) for each, graph in zip(kinds, graphs, strict=True)]
    per_layer, per_step = counted[0]
    if len(per_layer) != skeleton.depth:
        raise UnsupportedModel(f"{name} has {skeleton.depth} layers, but its graph {len(per_layer)}")
    return {
        "layers": [dict(types) for types in per_layer],
        "per_step": dict(per_step),
        "representatives": skeleton.representatives,
        "cache_copies": [node.name for graph in graphs for node in _cache_copies(graph)],
        "decode": _decode_graphs(kinds[0], graphs[0], soc),
        "schedules": [(dict(schedule), dict(types)) for schedule, types in graphs[0].schedules()],
        "other_steps": max(types.total() for types in counted[1][0]) if counted[1:] else None,
    }


def stand_for_ranks(count: int) -> None:
    """Let this process be the first of a group of ranks that exchange nothing, so that collectives convert."""
    if count == 1:
        return
    import torch.distributed as dist
    from torch._C._distributed_c10d import _register_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    _register_process_group(GROUP, dist.group.WORLD)


def _launches(traced: TracedGraph, known: DecoderLayers, graph: GeGraph) -> tuple[list[Counter[str]], Counter[str]]:
    """Operators of ``graph`` that launch a kernel, by decoder layer of ``traced``, and the rest."""
    layers = decoder_layers(traced.graph, known, traced.placeholder(traced.input_ids))
    of = {node.name: layer for node, layer in layers.of.items()}
    per_layer: list[Counter[str]] = [Counter() for _ in layers.paths]
    per_step: Counter[str] = Counter()
    for node in graph.computing():
        layer = of.get(node.origin, -1)
        (per_step if layer < 0 else per_layer[layer])[node.type] += 1
    return per_layer, per_step


def _decode_graphs(traced: TracedGraph, graph: GeGraph, soc: str) -> list[dict[str, int]]:
    from ..npu_tools.offline.decode_graphs import GraphCounts, static_decode_graph

    if why_not_static(traced):
        return []
    graphs = graph, static_decode_graph(traced, soc=soc)
    return [asdict(GraphCounts.of(each, cache_inputs(traced))) for each in graphs]


def _cache_copies(graph: GeGraph) -> list[Any]:
    caches = [name for name in graph.inputs if is_cache_input(name)]
    return graph.cache_copies(*caches) if caches else []
