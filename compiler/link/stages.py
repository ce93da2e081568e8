"""Stages of a pipeline: the part of a finished graph that the ranks of one stage run.

Ranks are numbered from the last stage, which yields the logits: rank 0 is its first.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ...passes.graph.stages import own_nodes, shared_nodes
from ...runtime.program import is_cache_input
from .linkage import Linkage


def stage_and_place(rank: int, linkage: Linkage) -> tuple[int, int]:
    """The stage that a rank of all runs, and its number among the ranks of that stage."""
    return len(linkage.boundaries) - rank // linkage.ranks, rank % linkage.ranks


def stage_of(graph: fx.Graph, linkage: Linkage, stage: int) -> tuple[fx.GraphModule, Linkage]:
    """The graph of one stage, and what its inputs receive.

    Args:
        graph: of all stages, with the operators that passes inserted.
        linkage: of it.
        stage: from 0.

    Raises:
        ValueError: the boundaries are not of this graph.
    """
    shared = shared_nodes(graph, linkage.input_ids)
    nodes = own_nodes(graph, shared)
    named = {node.name: node for node in graph.nodes}
    at = {node.name: i for i, node in enumerate(nodes)}
    bounds = linkage.boundaries
    is_last = stage == len(bounds)
    try:
        starts = [0, *(at[bound.first] for bound in bounds), len(nodes)]
        received = [named[value.name] for value in bounds[stage - 1].values] if stage else []
        sent = [] if is_last else [named[value.name] for value in bounds[stage].values]
    except KeyError as error:
        raise ValueError(f"the graph has no node {error} to part it at") from None
    own = nodes[starts[stage] : starts[stage + 1]]
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    needed = _needed([*own, *(output.all_input_nodes if is_last else sent)], set(received))
    known = {*own, *received, *shared}
    if foreign := next((n.name for n in needed if n.op != "placeholder" and n not in known), ""):
        raise ValueError(f"stage {stage} reads {foreign} of another one, which does not pass it on")
    inputs = _inputs(linkage, needed, is_last)
    result, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def add_input(node: fx.Node) -> None:
        made[node] = result.placeholder(node.name)
        made[node].meta = dict(node.meta)

    for node in graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            add_input(node)
    for node in received:
        add_input(node)
    for node in graph.nodes:
        if node in needed and node not in made:
            made[node] = result.node_copy(node, made.__getitem__)
    if is_last:
        result.node_copy(output, made.__getitem__)
    else:
        result.output(tuple(made[node] for node in sent))
    module = fx.GraphModule(graph.owning_module or {}, result)
    return module, _linkage(linkage, stage, tuple(n.name for n in result.nodes if n.op == "placeholder"), result)


def _needed(wanted: list[fx.Node], received: set[fx.Node]) -> set[fx.Node]:
    """What a stage computes or reads: what it wants, and all that this is made of, back to what it receives."""
    needed: set[fx.Node] = set()
    while wanted:
        node = wanted.pop()
        if node not in needed:
            needed.add(node)
            wanted += [] if node in received else node.all_input_nodes
    return needed


def _inputs(linkage: Linkage, needed: set[fx.Node], is_last: bool) -> set[str]:
    """Names of the graph's inputs that a stage has. Constants that others were computed from are watched by the
    last one."""
    names = {node.name for node in needed if node.op == "placeholder"} | {linkage.input_ids}
    for packed in linkage.packed:
        names |= set(packed.sources) if packed.name in names else set()
    for name, sources in linkage.merged.items():
        names |= set(sources) if name in names else set()
    return names | set(linkage.folded) if is_last else names


def _linkage(linkage: Linkage, stage: int, inputs: tuple[str, ...], graph: fx.Graph) -> Linkage:
    names, bounds = set(inputs), linkage.boundaries
    held = {int(name.rpartition("_")[2]) for name in names if is_cache_input(name)}
    return replace(
        linkage,
        inputs=inputs,
        read=frozenset(node.name for node in graph.nodes if node.op == "placeholder" and node.users),
        position_ids=linkage.position_ids if linkage.position_ids in names else "",
        step_inputs=tuple(name for name in linkage.step_inputs if name in names),
        token_counts=tuple(name for name in linkage.token_counts if name in names),
        merged={name: sources for name, sources in linkage.merged.items() if name in names},
        packed=tuple(packed for packed in linkage.packed if packed.name in names),
        folded=tuple(name for name in linkage.folded if name in names),
        cuts={name: cut for name, cut in linkage.cuts.items() if name in names},
        boundaries=(),
        held=frozenset(held),
        received=bounds[stage - 1].values if stage else (),
        sent=bounds[stage].values if stage < len(bounds) else (),
    )
