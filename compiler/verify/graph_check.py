"""The comparison of a rewritten graph with the captured one, in float32, over weights that let every part count.

The self-check on the model's own weights and dtype (``self_check``) sees what rounding does not hide and what these
weights make visible. Here the same two graphs run in float32 (``float32_run``) twice: with weights that make
attention peaked, biases count and logits large, so that a scale, a softcap or a lost key shows; and with weights so
small that the mean square of every row comes near the eps of its norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import value
from ...runtime.cache.cache_specs import has_state
from ...runtime.ops.linear.stored_weight import StoredWeight
from ...runtime.phases import phase
from ...runtime.step_metadata import PREVIOUS_HIDDEN
from ..capture.trace import Captured
from ..link.linkage import Linkage
from ..link.linker import LinkedProgram
from ..report import Verdict
from ..targets.npu.decode_steps import DecodeCalls
from ..targets.npu.route import Run
from ..tolerance import HALF, ROUNDINGS, chooses_keys, judged_share, routes_tokens, row_errors, typical
from ..weights.merged_weights import link_merged_weights
from .deferred_weights import ChangedWeight, OfRank, Part, Rows, Unpacked, Weights
from .float32_run import Deferred, Float32Graph, NodeByNode
from .lockstep import Lockstep, LockstepFloat32, LockstepStages, same_logits
from .self_check import (
    Reference,
    Schedule,
    arguments_alone,
    judge,
    planned_steps,
    run_alone,
    tolerating_rounding,
)

TOLERANCE = 5e-4
"""Float32's own rounding makes 1e-5 of it."""
_MOST = 0.02
"""The most that is tolerated of a model that amplifies rounding, in standard deviations."""
_ROUNDING = 2.0**-22
"""A relative change of weights that does to a product about what rounding its sums to float32 does."""
_SHARE = 0.9
"""Of the rows, whose rounding is measured."""
_ATTEMPTS = 4
"""Of graphs in which indexers choose keys, before they count as different."""


LARGE = Weights("large weights", 1.5, 1.0, 0.1, Schedule((75, 9, 30), (40, 3, 23), 32, decoded=2))
LARGE_OF_LONG = replace(LARGE, schedule=Schedule((150, 9, 40), (70, 3, 33), 32, decoded=2))
"""The same where recurrences run in chunks of up to 64 tokens, or an indexer chooses between the keys."""
SMALL = Weights("small weights", 0.02, 0.1, 0.0, Schedule((12, 5), (6, 3), 4, decoded=1))


@phase("verify")
def check_graph(original: TracedGraph, *rewritten: TracedGraph, alone: bool = False) -> Verdict:
    """Compare two graphs over caches of full precision.

    Args:
        original: as it was captured: the graph before any pass.
        rewritten: what passes made of it, before its weights are packed; for several ranks, one for each.
        alone: as in ``self_check.check``.

    Returns:
        the verdict of the run that shows the larger error.
    """
    verdicts = []
    chooses = chooses_keys(rewritten[0].graph)
    for weights in (LARGE_OF_LONG if chooses or has_state(rewritten[0].caches) else LARGE, SMALL):
        verdict = _compare(original, rewritten, weights, alone=alone, seed=0)
        for seed in range(1, _ATTEMPTS if chooses else 2):
            if verdict.ok or not math.isfinite(verdict.error):
                break
            # A router that is almost undecided may flip by float32's own rounding: not twice. An indexer decides
            # between more, in every row.
            again = _compare(original, rewritten, weights, alone=alone, seed=seed)
            verdict = min(verdict, again, key=lambda v: v.error)
        if not verdict.ok:
            return replace(verdict, reason=f"over {weights.name} in float32 {verdict.reason}")
        verdicts.append(verdict)
    return max(verdicts, key=lambda verdict: verdict.error)


@phase("verify")
def check_own_weights(
    traced: TracedGraph | Sequence[TracedGraph], reference: Reference, *, alone: bool = False
) -> Verdict:
    """``self_check.check`` of a graph over the model's own weights where they lie: each is read once for all steps,
    stored ones are unpacked then, and rows of merged ones are multiplied one after the other.

    Args:
        traced: as passes made it, before its weights are packed; for several ranks, one for each.
        reference: what to run and what is right.
        alone: as in ``self_check.check``.
    """
    graphs = [traced] if isinstance(traced, TracedGraph) else traced
    judged = tolerating_rounding(reference, graphs[0].caches)
    own = [_own_constants(of_rank) for of_rank in graphs]
    return judge(_compared_steps(graphs, own, reference, alone, in_float32=False), judged)


def own_logits(traced: TracedGraph, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Logits ``[length, vocab]``, float32, on the host, of sequences by a graph without caches, in its own dtype over
    its own weights."""
    traced.recompile()
    own = _matrices_deferred(traced.constants)
    run = NodeByNode(traced.module, _kept(own))
    return [run_alone(traced, run, own, sequence).cpu() for sequence in tokens]


def own_steps(
    traced: TracedGraph, reference: Reference, decode: TracedGraph | None = None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """As ``self_check.compared_steps`` of a graph in its own dtype over its own weights, node by node.

    Args:
        traced: as passes made it, before its weights are packed.
        reference: what to run and what is right.
        decode: a graph of the same inputs that runs steps of one token per sequence.
    """
    link_merged_weights(traced)
    constants = _own_constants(traced)
    run: Run = NodeByNode(traced.module, _kept(constants))
    if decode is not None:
        decode.recompile()
        run = DecodeCalls(traced, decode, NodeByNode(decode.module, _kept(constants)), run)
    program = LinkedProgram(Linkage.of(traced), constants, run)
    for step in planned_steps(program, reference):
        yielded = run(*program.arguments(step.input_ids, step.position_ids, step.metadata))
        yield step.group, program.logits(yielded, step.metadata).float().cpu(), step.expected


def _own_constants(traced: TracedGraph) -> dict[str, Any]:
    traced.recompile()
    constants = _matrices_deferred(traced.constants)
    for name, sources in traced.notes.merged.items():
        if name not in constants:
            constants[name] = Rows([Unpacked(traced.constants[source]) for source in sources])
    return constants


@phase("verify")
def measure_rounding(captured: Captured, reference: Reference) -> None:
    """Let a reference of a half-precision model tolerate what that precision does to the model itself: the captured
    graph as it is, compared with the same in float32, on the model's weights. Of these some rows are unpacked or
    widened at a time.

    Args:
        captured: the graph.
        reference: of the layers that were captured; its ``tolerance`` and ``share`` are set.
    """
    if reference.dtype not in HALF or not on_cpu(captured.traced):
        return
    traced, tokens = captured.traced, reference.tokens[-1]
    (rounded,) = own_logits(traced, [tokens])
    wide = {name: ChangedWeight(w, 1.0, 0.0) if _is_matrix(w) else w for name, w in traced.constants.items()}
    exact = run_alone(traced, Float32Graph(traced.module, _kept(wide)), wide, tokens)
    rounding = typical(row_errors(rounded, exact).tolist(), judged_share(reference.dtype))
    reference.tolerance = ROUNDINGS * rounding
    if routes_tokens(traced.graph):
        reference.share = 0.5


def _matrices_deferred(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Constants of which matrices are multiplied some rows at a time; stored ones are unpacked then."""
    return {name: Unpacked(w) if _is_matrix(w) else w for name, w in constants.items()}


def _is_matrix(weight: Any) -> bool:
    """True if a constant is a parameter that takes memory."""
    is_parameter = isinstance(weight, nn.Parameter) and weight.is_floating_point() and weight.dim() > 1
    return isinstance(weight, StoredWeight) or is_parameter


def can_check(traced: TracedGraph) -> bool:
    """True if a graph can run in float32: on the host, over caches that round nothing."""
    return on_cpu(traced) and not any(spec.has_scales for spec in traced.caches)


def on_cpu(traced: TracedGraph) -> bool:
    """True if a graph runs on the host."""
    return bool(value(traced.placeholder(traced.input_ids)).device.type == "cpu")


def _compare(
    original: TracedGraph, rewritten: Sequence[TracedGraph], weights: Weights, *, alone: bool, seed: int
) -> Verdict:
    own = [_constants(original, of_rank, weights) for of_rank in rewritten]
    constants = {**own[0], **_wholes(own[0], rewritten[0])}
    vocab_size = Linkage.of(rewritten[0]).vocab_size
    limit = original.max_positions or 1 << 30
    schedule = weights.schedule.within(limit)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, vocab_size, (n,), generator=generator) for n in schedule.lengths]
    original.recompile()
    logits = _logits(original, constants, tokens)
    rows = original.placeholder(PREVIOUS_HIDDEN) if PREVIOUS_HIDDEN in original.step_inputs else None
    width = 0 if rows is None else int(value(rows).shape[-1])
    reference = Reference(tokens, logits, torch.float32, schedule, TOLERANCE, hidden_size=width)
    verdict = judge(_compared_steps(rewritten, own, reference, alone), reference)
    if verdict.ok or verdict.error > _MOST or chooses_keys(rewritten[0].graph):
        return verdict
    # Scores of large heads without a scale, over many layers, amplify rounding: as much as in the model is right.
    changed = {n: replace(w, rounding=_ROUNDING) if isinstance(w, ChangedWeight) else w for n, w in constants.items()}
    rounded = _logits(original, changed, tokens)
    errors = torch.cat([row_errors(*pair) for pair in zip(rounded, logits, strict=True)])
    # Where a router selects another expert, the row says nothing about rounding.
    tolerance = min(_MOST, ROUNDINGS * typical(errors.tolist(), _SHARE))
    return replace(verdict, ok=True, tolerance=tolerance, reason="") if verdict.error <= tolerance else verdict


def _logits(
    original: TracedGraph, constants: Mapping[str, Any], tokens: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What the captured graph makes of each sequence in float32."""
    run = Float32Graph(original.module, _kept(constants))
    yielded = run.together([arguments_alone(original, constants, sequence) for sequence in tokens])
    return [outputs[0][0].float() for outputs in yielded]


def _compared_steps(
    graphs: Sequence[TracedGraph],
    constants: Sequence[Mapping[str, Any]],
    reference: Reference,
    alone: bool,
    *,
    in_float32: bool = True,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """As ``self_check.compared_steps``; all steps run together, a weight is made once for them.

    Where states are read by one node and written by another, a step that ran together with the one before it would
    read what that has not written yet: there they run one after the other.
    """
    linkage = Linkage.of(graphs[0])
    if in_float32:
        linkage = replace(linkage, caches=tuple(replace(spec, dtype=torch.float32) for spec in linkage.caches))
    for traced in graphs:
        traced.recompile()
    kind = LockstepFloat32 if in_float32 else Lockstep
    run: Lockstep | LockstepStages = kind([traced.module for traced in graphs], _kept(constants[0]))
    if linkage.boundaries:
        run = LockstepStages(kind, graphs, linkage, _kept(constants[0]))
    programs = [LinkedProgram(linkage, own, run.ranks) for own in constants]
    planned = [list(planned_steps(program, reference, alone=alone)) for program in programs]  # each binds its caches
    inputs = [
        [
            p.arguments(step.input_ids, step.position_ids, step.metadata)
            for p, step in zip(programs, same, strict=True)
        ]
        for same in zip(*planned, strict=True)
    ]
    one_by_one = graphs[0].npu is not None and has_state(linkage.caches)
    outputs = [run.ranks([given])[0] for given in inputs] if one_by_one else run.ranks(inputs)
    for step, yielded in zip(planned[0], outputs, strict=True):
        yield step.group, programs[0].logits(same_logits(yielded), step.metadata).float(), step.expected


def _kept(constants: Mapping[str, Any]) -> list[str]:
    return [name for name, made in constants.items() if not isinstance(made, Deferred)]


def _constants(original: TracedGraph, rewritten: TracedGraph, weights: Weights) -> dict[str, Any]:
    """Values of the constants of both graphs, by name."""
    folded = set(rewritten.notes.folded)
    changed: dict[int, ChangedWeight] = {}
    constants: dict[str, Any] = {**original.constants, **rewritten.constants}
    parts = rewritten.notes.parts

    def changed_weight(name: str, tensor: torch.Tensor) -> ChangedWeight | None:
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.dim() > 0
        if not is_weight or name in folded:
            return None
        if id(tensor) not in changed:
            changed[id(tensor)] = ChangedWeight.of(tensor, weights)
        return changed[id(tensor)]

    for name, tensor in constants.items():
        constants[name] = changed_weight(name, tensor) or tensor
    for name, part in parts.items():
        if (of := changed_weight(name, part.whole)) is not None:
            constants[name] = OfRank(of, rewritten.constants[name], part.cut, rewritten.rank)
    for name, sources in rewritten.notes.merged.items():
        constants[name] = Rows([constants[source] for source in sources])
    for name, tensor in constants.items():
        if isinstance(tensor, StoredWeight):
            whole = parts[name].whole if name in parts else tensor
            of = next((weight for weight in changed.values() if _is_turned(whole, weight.tensor)), None)
            constants[name] = tensor if of is None else replace(of, tensor=tensor)
        elif isinstance(tensor, torch.Tensor):
            of = next((weight for weight in changed.values() if _is_part(tensor, weight.tensor)), None)
            constants[name] = tensor if of is None else Part(of, tensor)
    return constants


def _wholes(constants: Mapping[str, Any], rewritten: TracedGraph) -> dict[str, Any]:
    """Of the inputs that receive parts, what all ranks hold together."""
    parts = rewritten.notes.parts.items()
    made = {name: (constants[name], part.whole) for name, part in parts}
    return {name: held.of if isinstance(held, OfRank) else whole for name, (held, whole) in made.items()}


def _is_turned(tensor: StoredWeight, weight: torch.Tensor) -> bool:
    """True if ``tensor`` is all of a stored weight, perhaps transposed."""
    return (
        isinstance(weight, StoredWeight)
        and tensor.codes.data_ptr() == weight.codes.data_ptr()
        and tensor.codes.shape == weight.codes.shape
    )


def _is_part(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if all of ``tensor`` lies within the memory of ``weight``."""
    first = tensor.storage_offset() - weight.storage_offset()
    return (
        not isinstance(weight, StoredWeight)
        and tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        and weight.numel() > 0
        and first >= 0
        and first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        < weight.numel()
    )
