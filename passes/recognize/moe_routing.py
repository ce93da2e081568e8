"""Recognize how a mixture of experts chooses: scores, groups, top k, weights.

Matches (any spelling, with any subset of the optional steps):
    scores = softmax(logits) | sigmoid(logits) | sqrt(softplus(logits)) | logits
    choice = scores + correction_bias
    choice = choice of the best groups only     # groups ranked by their best expert, or by the sum of the best two
    ids = choice.topk(K)
    w = scores.gather(ids)
    w = w / (w.sum() + epsilon) | w / max(w.sum(), epsilon) | softmax(w) | sigmoid(w)
    w = w * scaling
Becomes:
    w, ids = pagoda::moe_gating(logits, correction_bias, K, scoring, groups, topk_groups, group_scoring, weighting,
                                epsilon, scaling)
Why it is faster:
    one small operator instead of ten to twenty-five, and the unit that a target has a kernel for.

Level 2. Works backwards from pagoda::moe. Candidates are made of what occurs in the region and run on random logits;
one that agrees on the experts and on their weights is taken. Source: DeepSeek-V3, 2024, section 2.1.2.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...runtime.ops.moe.moe import moe_gating_reference
from ..graph.evaluate import at_sizes
from ..graph.fx_nodes import callee, is_dynamic, is_tensor, shape, value
from ..graph.record import NoMatch, PassRecord
from ..graph.region import OpenRegion, Region
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph
from .moe import MOE

if TYPE_CHECKING:
    import sympy

MOE_GATING = torch.ops.pagoda.moe_gating.default

_TOKENS = 29
_MOST_NODES = 60
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
_RESCALED = ("_to_copy", "clone", "mul.Tensor", "div.Tensor")
_PRODUCTS = ("mm", "addmm", "linear", "bmm", "baddbmm", "moe")
_SCORING_NODES = {"softmax": "_softmax", "sigmoid": "sigmoid", "sqrt_softplus": "softplus"}
_WEIGHTING_NODES = {"softmax": "_softmax", "sigmoid": "sigmoid"}


@dataclass(frozen=True)
class _Gating:
    """The arguments of ``pagoda::moe_gating`` behind the tensors."""

    top_k: int
    scoring: str
    groups: int = 1
    topk_groups: int = 1
    group_scoring: str = "max"
    weighting: str = "none"
    epsilon: float = 0.0
    scaling: float = 1.0

    def arguments(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


_Known = dict[Hashable, tuple[_Gating, bool] | None]
"""Gating that regions with one signature compute; whether the chosen experts are in the operator's order, too."""


def recognize_moe_routing(traced: TracedGraph) -> PassRecord:
    """Replace what chooses the experts of every ``pagoda::moe`` by ``pagoda::moe_gating``."""
    known: _Known = {}

    def step(node: fx.Node) -> str | None:
        if node.op != "call_function" or node.target is not MOE or _is_gated(node):
            return None
        _replace(traced, node, known)
        return ""

    return rewrite_each(traced, "recognize_moe_routing", step)


def _is_gated(moe: fx.Node) -> bool:
    ids = moe.args[2]
    return callee(ids) == "getitem" and ids.args[0].target is MOE_GATING


def _replace(traced: TracedGraph, moe: fx.Node, known: _Known) -> None:
    weights, ids = moe.args[1], moe.args[2]
    candidates = _logits_before(ids, shape(moe.args[3])[0])
    if not candidates:
        raise NoMatch("the experts are not chosen by scores of all of them")
    reason = ""
    # The largest region first: weights that are scaled at last are weights before that as well.
    for end, logits in itertools.product(_ends(weights), candidates):
        try:
            region, bias = _region(logits, end, ids)
        except OpenRegion as why:
            reason = reason or f"the selection of experts depends on more than their scores: {why}"
            continue
        key = (region.signature(), shape(moe.args[3])[0])
        if key not in known:
            known[key] = _gating(region, bias)
        found = known[key]
        if found is not None:
            _insert(traced, moe, region, bias, *found)
            return
        reason = "the operator does not support this selection or weighting of experts"
    raise NoMatch(reason)


def _logits_before(ids: fx.Node, experts: int) -> list[fx.Node]:
    """The nodes above ``ids`` that could be the scores ``[N, experts]`` of all experts, first computed first."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    pending = [ids]
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        if node in seen or not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        seen.add(node)
        if is_tensor(node) and value(node).is_floating_point():
            sizes = shape(node)
            if str(sizes) == str((shape(ids)[0], experts)):
                found.append(node)
        if callee(node) not in _PRODUCTS:
            pending += node.all_input_nodes
    order = {n: i for i, n in enumerate(ids.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _ends(weights: fx.Node) -> list[fx.Node]:
    """``weights``, and the tensors of its shape that it is a cast or a product of, nearest first."""
    found = [weights]
    for node in found:
        if callee(node) in _RESCALED and len(found) < _MOST_NODES:
            found += [n for n in node.all_input_nodes if str(shape(n)) == str(shape(weights)) and n not in found]
    return found


def _region(logits: fx.Node, end: fx.Node, ids: fx.Node) -> tuple[Region, fx.Node | None]:
    """The region between the scores and the outputs, and the bias that it adds to them.

    Raises:
        OpenRegion: it reads more than these, or computes in a dtype that is none of theirs.
    """
    bias = _bias(logits, end, ids)
    region = Region([logits, *([] if bias is None else [bias])], [end, ids])
    narrow, wide = value(logits).dtype, value(end).dtype
    if narrow != wide and (narrow not in (torch.bfloat16, torch.float16) or wide != torch.float32):
        raise OpenRegion(f"the scores are {narrow}, the weights {wide}")
    dtypes = {narrow, wide} if bias is None else {narrow, wide, value(bias).dtype}
    for node in region.nodes:
        if is_tensor(node) and value(node).is_floating_point() and value(node).dtype not in dtypes:
            raise OpenRegion(f"{node.name} is {value(node).dtype}, the scores are {narrow}")
    return region, bias


def _bias(logits: fx.Node, end: fx.Node, ids: fx.Node) -> fx.Node | None:
    """The tensor ``[E]`` that is added to something made of ``logits``."""
    depends = {logits: True}

    def from_logits(node: fx.Node, depth: int = 0) -> bool:
        if node not in depends:
            depends[node] = False
            if node.op == "call_function" and depth < _MOST_NODES and callee(node) not in _PRODUCTS:
                depends[node] = any([from_logits(n, depth + 1) for n in node.all_input_nodes])
        return depends[node]

    from_logits(end)
    from_logits(ids)
    for node in depends:
        if callee(node) == "add.Tensor" and depends[node]:
            for operand in node.args[:2]:
                if isinstance(operand, fx.Node) and not depends.get(operand, True):
                    return operand if shape(operand) == shape(logits)[1:] else None
    return None


def _gating(region: Region, bias: fx.Node | None) -> tuple[_Gating, bool] | None:
    """The arguments with which the operator computes what ``region`` computes, and whether in the same order."""
    sizes: dict[sympy.Symbol, int] = {s: _TOKENS + 2 * i for i, s in enumerate(region.symbols)}
    try:
        runs = [(given, region.run(sizes, given)) for given in _inputs(region, bias, sizes)]
    except (RuntimeError, TypeError, IndexError):  # sizes that only the real graph has
        return None
    for candidate in _candidates(region):
        pairs = [(found, _expected(candidate, given, found[0].dtype)) for given, found in runs]
        if all(_agree(*pair) for pair in pairs):
            return candidate, all(torch.equal(found[1], expected[1]) for found, expected in pairs)
    return None


def _inputs(region: Region, bias: fx.Node | None, sizes: dict[sympy.Symbol, int]) -> Iterator[list[torch.Tensor]]:
    """Random scores and biases, for enough tokens in all: a graph may be fixed to a single one."""
    generator = torch.Generator().manual_seed(0)
    shape_of_logits = at_sizes(shape(region.inputs[0]), sizes)
    tokens = max(1, shape_of_logits[0])
    for i in range(max(3, -(-_TOKENS // tokens))):
        logits = torch.randn(shape_of_logits, generator=generator)
        # Every third token has scores so small, and every third so uneven, that a term beside their sum shows.
        kind = torch.arange(i * tokens, i * tokens + len(logits))[:, None] % 3
        logits = torch.where(kind == 1, logits - 46.0, torch.where(kind == 2, logits * 8.0, logits))
        given = [logits.to(value(region.inputs[0]).dtype)]
        if bias is not None:
            # Biases of one sign show what stands for an expert that cannot be chosen.
            correction = torch.randn(logits.shape[1], generator=generator) + (0.0, -3.0, 3.0)[(i + i // 3) % 3]
            given.append(correction.to(value(bias).dtype))
        yield given


def _expected(gating: _Gating, given: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # Scores that are widened after the choice may as well be widened before it: the order stays.
    return moe_gating_reference(given[0].to(dtype), given[1] if len(given) > 1 else None, *gating.arguments())


def _candidates(region: Region) -> Iterator[_Gating]:
    """Everything that the operator can do with the steps and constants of ``region``."""
    logits, (_, ids) = region.inputs[0], region.outputs
    experts = shape(logits)[1]
    names = {callee(node) for node in region.nodes}
    over_all = {callee(node) for node in region.nodes if str(shape(node)) == str(shape(logits))}
    over_chosen = {callee(node) for node in region.nodes if str(shape(node)) == str(shape(ids))}
    scorings = [scoring for scoring, name in _SCORING_NODES.items() if name in over_all] or ["none"]
    small = {callee(n): x for n in region.nodes for x in n.args[1:] if isinstance(x, float) and 0 < x < 1e-3}
    weightings: list[tuple[str, float]] = [("none", 0.0)]
    if "div.Tensor" in names:
        clamped = small.get("clamp") or small.get("clamp_min")
        weightings.append(("clamped_sum", clamped) if clamped else ("sum", small.get("add.Tensor", 0.0)))
    weightings += [(weighting, 0.0) for weighting, name in _WEIGHTING_NODES.items() if name in over_chosen]
    scalings = [x for x in region.numbers() if x >= 1e-3 and x != 1.0]
    groupings: list[tuple[int, int, str]] = []
    for grouped in region.nodes:
        sizes = shape(grouped)
        if len(sizes) != 3 or is_dynamic(sizes[1]) or is_dynamic(sizes[2]):
            continue
        if sizes[1] > 1 and sizes[1] * sizes[2] == experts:
            for best in region.nodes:
                kept: Any = best.args[1] if callee(best) == "topk" and len(shape(best.args[0])) == 2 else None
                if kept is not None and shape(best.args[0])[1] == sizes[1]:
                    groupings += [(sizes[1], kept, scoring) for scoring in ("top2", "max")]
    for scoring, (weighting, epsilon), scaling, (groups, topk_groups, ranking) in itertools.product(
        scorings, reversed(weightings), (*scalings, 1.0), dict.fromkeys((*groupings, (1, 1, "max")))
    ):
        if ranking == "max" or experts // groups >= 2:
            yield _Gating(shape(ids)[1], scoring, groups, topk_groups, ranking, weighting, epsilon, scaling)


def _agree(found: list[torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Tell whether every token goes to the same experts with the same weights, in any order."""
    weights, ids = found
    if weights.shape != expected[0].shape or weights.dtype != expected[0].dtype or ids.dtype != expected[1].dtype:
        return False
    order, expected_order = ids.sort(dim=1), expected[1].sort(dim=1)
    if not torch.equal(order.values, expected_order.values):
        return False
    a, b = weights.gather(1, order.indices).double(), expected[0].gather(1, expected_order.indices).double()
    return torch.allclose(a, b, rtol=_TOLERANCE.get(weights.dtype, 0.0), atol=1e-30)


def _insert(
    traced: TracedGraph, moe: fx.Node, region: Region, bias: fx.Node | None, gating: _Gating, ordered: bool
) -> None:
    """Put the operator in the place of the region.

    Raises:
        NoMatch: something else reads what the operator does not yield, or yields in another order.
    """
    end, ids = region.outputs
    inside = set(region.nodes)
    outside = {n: [u for u in n.users if u not in inside] for n in region.nodes if is_tensor(n)}
    for node, users in outside.items():
        if users and node not in (end, ids):
            raise NoMatch(f"{node.name} is also read by {users[0].name}")
    if not ordered:
        if outside[ids] != [moe]:
            raise NoMatch(
                f"{ids.name}, in an order that the operator does not keep, is not read by the experts alone"
            )
        node = end
        while node is not moe:
            users = [u for u in node.users if u not in inside]
            if len(users) != 1 or (users[0] is not moe and users[0].all_input_nodes != [node]):
                raise NoMatch(f"{node.name}, in an order that the operator does not keep, is read otherwise")
            node = users[0]
    position = {n: i for i, n in enumerate(traced.graph.nodes)}
    first = min({*outside[end], *outside[ids]}, key=position.__getitem__)
    if any(position[n] > position[first] for n in region.inputs):
        raise NoMatch(f"{first.name} reads the weights before the experts are chosen")
    with traced.before(first):
        logits = region.inputs[0]
        if value(logits).dtype != value(end).dtype:
            logits = traced.call(torch.ops.aten._to_copy.default, logits, dtype=value(end).dtype)
        both = traced.call(MOE_GATING, logits, bias, *gating.arguments())
        weights, chosen = traced.call(operator.getitem, both, 0), traced.call(operator.getitem, both, 1)
    for old, new in ((end, weights), (ids, chosen)):
        for user in outside[old]:
            user.replace_input_with(old, new)
