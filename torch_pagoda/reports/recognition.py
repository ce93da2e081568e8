"""The share of a model that the passes recognized, and what they missed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from ..passes import PassRecord
from ..passes.graph.fx_nodes import module_path
from ..passes.graph.provenance import DecoderLayers, scopes
from ..runtime.ops import OPERATORS
from .expected import KINDS, Expected
from .regions import UNSAID, said_about

_EXPERTS = re.compile(r"Experts$")
# The passes that recognize a kind, and those that take some of it for another kind.
_PASSES_OF_KIND: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention": (
        ("recognize_sdpa", "recognize_eager_attention", "recognize_indexed_attention", "recognize_relative_bias"),
        (),
    ),
    "norm": (("recognize_rms_norm", "recognize_layer_norm"), ()),
    "rope": (("recognize_rope",), ()),
    "gated_mlp": (("recognize_gated_activation",), ()),
    "activation": (("recognize_activation",), ("recognize_gated_activation",)),
    "moe": (("recognize_moe",), ()),
}


@dataclass(frozen=True)
class Missed:
    """A structure that no pass recognized.

    Attributes:
        module: qualified name of the module that computes it.
        layer: index of the decoder layer; -1 outside of all.
        reason: a pass's near miss, or that there is none.
    """

    module: str
    layer: int
    reason: str


@dataclass(frozen=True)
class Recognition:
    """One kind of structure: how many a model has, and how many became canonical operators.

    Attributes:
        kind: one of ``expected.KINDS``.
        expected: number in the unmodified graph.
        matched: at most ``expected``.
        missed: the others.
    """

    kind: str
    expected: int
    matched: int
    missed: tuple[Missed, ...]


def recognition(
    expected: Sequence[Expected], graph: fx.Graph, layers: DecoderLayers, records: Iterable[PassRecord]
) -> list[Recognition]:
    """Compare the structures of an unmodified graph with the operators of the lowered one.

    Layer by layer, as fusions may move an operator from one module to its neighbor. For a graph lowered for an NPU,
    the counts of the passes are used.

    Args:
        expected: from ``expected_matches``.
        graph: the lowered graph.
        layers: its decoder layers, numbered as for ``expected``.
        records: reports of the passes, for the reasons.
    """
    said = list(records)
    if any(record.routes for record in said):
        return _before_lowering(expected, said)
    found: Counter[tuple[str, int]] = Counter()
    modules: set[tuple[str, str]] = set()
    for node in graph.nodes:
        kind, count = canonical(node)
        if count and not (kind == "gated_mlp" and any(_EXPERTS.search(scope.kind) for scope in scopes(node))):
            found[kind, layers.of.get(node, -1)] += count
            modules.add((kind, module_path(node)))
    result = []
    for kind in KINDS:
        wanted = [e for e in expected if e.kind == kind]
        missed = []
        for layer in sorted({e.layer for e in wanted}):
            here = [e for e in wanted if e.layer == layer]
            # Those whose module has an operator of the kind come first among the recognized.
            here.sort(key=lambda e: (e.kind, e.module) not in modules)
            for e in here[found[kind, layer] :]:
                missed.append(Missed(e.module, layer, said_about(kind, "", e.module, said)))
        result.append(Recognition(kind, len(wanted), len(wanted) - len(missed), tuple(missed)))
    return result


def _before_lowering(expected: Sequence[Expected], records: Sequence[PassRecord]) -> list[Recognition]:
    """By the counts of the passes, if lowering has replaced the canonical operators, sometimes several by one."""
    matches: Counter[str] = Counter()
    for record in records:
        matches[record.name] += record.matches
    result = []
    for kind in KINDS:
        wanted = [e for e in expected if e.kind == kind]
        passes, taken = _PASSES_OF_KIND[kind]
        count = sum(matches[name] for name in passes) - sum(matches[name] for name in taken)
        lacking = max(0, len(wanted) - max(0, count))
        told = [Missed(e.module, e.layer, said_about(kind, "", e.module, records)) for e in wanted]
        # Those that a pass has said something about are likelier the ones.
        told.sort(key=lambda missed: missed.reason == UNSAID)
        result.append(Recognition(kind, len(wanted), len(wanted) - lacking, tuple(told[:lacking])))
    return result


def canonical(node: fx.Node) -> tuple[str, int]:
    """The kind and number that a canonical operator counts as; ("", 0) for any other node."""
    own = OPERATORS.get(node.target)  # type: ignore[call-overload]
    kind = own.facts.kind if own else ""
    if kind == "rope":  # counts each tensor
        tensors = node.args[0]
        return kind, len(tensors) if isinstance(tensors, list | tuple) else 1
    return kind, 1 if kind else 0
