"""Recognize root-mean-square norms that a gate multiplies.

Matches:
    rms_norm(x, weight) * activation(gate, kind)             # Gated DeltaNet, Kimi Delta Attention
    rms_norm(groups(x * activation(gate, kind))) * weight    # Mamba-2
    where kind is silu or sigmoid, of the gate in float32; with casts and views between, and the scale behind the view
Becomes:
    pagoda::gated_rms_norm(x, gate, weight, eps, weight_offset, round_before_scale, kind, gate_first, group_size)
Why it is faster:
    one pass over rows in half precision instead of up to seven in float32; and a gate that is part of a merged
    product is read without a copy.

Level 2, for a CPU: no operator of an NPU multiplies a norm. The pass runs each spelling once and compares it with its
replacement, so that half precision rounds where it did. Sources: Yang et al., Gated Delta Networks, 2024; Dao and Gu,
Transformers are SSMs, 2024.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from ...runtime.ops.norm.gated_rms_norm import GATES, gated_rms_norm_reference
from ..graph.data_movement import COPIES, RESHAPES
from ..graph.fx_nodes import callee, is_dynamic, shape, value
from ..graph.record import NoMatch, PassRecord
from ..graph.region import Region
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph
from .activation import ACTIVATION
from .norm_region import HALF, cast_source, difference, is_scale
from .rms_norm import RMS_NORM

GATED_RMS_NORM = torch.ops.pagoda.gated_rms_norm.default
_VIEWS = RESHAPES | COPIES


@dataclass(frozen=True)
class _Gated:
    """A norm and the gate that multiplies it.

    Attributes:
        x: what is normed, or multiplied by the gate and then normed.
        activation: of the gate.
        product: of the two, or of the norm and the activated gate.
        gate_first: the gate multiplies what is normed.
        chain: from the norm to the end of what belongs to it, each node read by the next one alone.
    """

    x: fx.Node
    activation: fx.Node
    product: fx.Node
    gate_first: bool
    chain: list[fx.Node]


def recognize_gated_norm(traced: TracedGraph) -> PassRecord:
    """Replace every norm and the gate in front of it or behind it by ``pagoda::gated_rms_norm``."""
    known: dict[Hashable, str] = {}

    def step(node: fx.Node) -> str | None:
        if node.op != "call_function" or node.target is not RMS_NORM or is_dynamic(shape(node)[-1]):
            return None
        reason = None
        for find in (_gate_in_front, _gate_behind):
            try:
                found = find(node)
                if found is not None:
                    _replace(traced, node, found, known)
                    return ""
            except NoMatch as why:
                reason = str(why)
        return reason

    return rewrite_each(traced, "recognize_gated_norm", step)


def _gate_in_front(norm: fx.Node) -> _Gated | None:
    above = _above(norm.args[0])
    product = above[-1]
    operands = _operands(product)
    if operands is None:
        return None
    for node in above:
        _check_read_once(node, "the gated product")
    if value(product).dtype in HALF:
        raise NoMatch(f"the gated product is rounded to {value(product).dtype}")
    chain, _ = _follow(norm, seeks_gate=False)
    return _Gated(operands[1], operands[0], product, True, chain)


def _gate_behind(norm: fx.Node) -> _Gated | None:
    chain, product = _follow(norm, seeks_gate=True)
    operands = None if product is None else _operands(product)
    if product is None or operands is None:
        return None
    x = norm.args[0]
    assert isinstance(x, fx.Node)
    return _Gated(x, operands[0], product, False, chain)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The activated gate of a product, and what it multiplies; None for any other node."""
    if callee(product) != "mul.Tensor":
        return None
    a, b = product.args
    for gate, other in ((a, b), (b, a)):
        if (
            isinstance(gate, fx.Node)
            and gate.target is ACTIVATION
            and isinstance(other, fx.Node)
            and other is not gate
        ):
            return gate, other
    return None


def _follow(norm: fx.Node, *, seeks_gate: bool) -> tuple[list[fx.Node], fx.Node | None]:
    """The nodes from a norm on that belong to it, one scale among them, and the product with a gate, if sought."""
    chain, product = [norm], None
    while True:
        node = chain[-1]
        if seeks_gate and product is None:
            product = next((user for user in node.users if _operands(user)), None)
            if product is not None:
                _check_read_once(node, "the norm")
        if len(node.users) != 1:
            return chain, product
        (user,) = node.users
        scales = _weight(chain) is None and _scale(user, node) is not None
        if user is not product and not scales and callee(user) not in _VIEWS | {"_to_copy"}:
            return chain, product
        chain.append(user)


def _weight(chain: list[fx.Node]) -> fx.Node | None:
    """The scale that the norm in front of a chain takes, or that a product in the chain multiplies by."""
    own = chain[0].args[1]
    if isinstance(own, fx.Node):
        return own
    return next((scale for node, user in pairwise(chain) if (scale := _scale(user, node))), None)


def _check_read_once(node: fx.Node, what: str) -> None:
    if len(node.users) != 1:
        raise NoMatch(f"{what} has {len(node.users)} users")


def _scale(product: fx.Node, node: fx.Node) -> fx.Node | None:
    """The ``[D]`` parameter that ``node``, ``[..., D]`` or the groups of that, is multiplied by."""
    if callee(product) != "mul.Tensor":
        return None
    other = product.args[1] if product.args[0] is node else product.args[0]
    width = shape(node)[-1]
    if callee(other) in RESHAPES and str(shape(other)) == str(shape(node)[-2:]):
        width *= shape(other)[0]
        other = other.args[0]  # type: ignore[union-attr]
    return other if isinstance(other, fx.Node) and is_scale(other, width) else None


def _replace(traced: TracedGraph, norm: fx.Node, found: _Gated, known: dict[Hashable, str]) -> None:
    """Put the operator where the last node of the chain that belongs to it is."""
    kind = _gate_kind(found)
    dtype = value(_above(found.activation.args[0])[-1]).dtype
    output = _output(found, dtype)
    x, gate = _aligned(found, output)
    chain = found.chain[: found.chain.index(output) + 1]
    rounded = any(value(node).dtype in HALF for node in chain[:-1])
    weight = _weight(chain)
    if weight is not None and value(cast_source(weight)).dtype is dtype:
        weight = cast_source(weight)
    _check_operands(x, gate, weight, rounded)
    _check_groups(shape(gate)[-1], shape(norm)[-1])
    _, own, eps, offset, _ = norm.args
    parameters = (eps, offset if own else 0.0, rounded, kind, found.gate_first, int(shape(norm)[-1]))
    inputs = list(dict.fromkeys(node for node in (x, gate, weight) if node is not None))

    def replacement(*given: torch.Tensor) -> torch.Tensor:
        drawn = dict(zip(inputs, given, strict=True))
        scale = None if weight is None else drawn[weight]
        return gated_rms_norm_reference(drawn[x], drawn[gate], scale, *parameters)

    region = Region(inputs, [output])
    key = (region.signature(), parameters)
    if key not in known:
        known[key] = difference(region, replacement)
    if known[key]:
        raise NoMatch(f"it is not pagoda::gated_rms_norm: {known[key]}")
    with traced.before(output, like=norm):
        new = traced.call(GATED_RMS_NORM, x, gate, weight, *parameters)
        if str(shape(new)) != str(shape(output)):
            sizes = [-1 if is_dynamic(size) else int(size) for size in shape(output)]
            new = traced.call(torch.ops.aten.view.default, new, sizes)
    traced.substitute(output, new)


def _gate_kind(found: _Gated) -> str:
    """The activation of a gate that multiplies as the operator does."""
    activation, kind = found.activation, found.activation.args[1]
    if kind not in GATES:
        raise NoMatch(f"its gate goes through {kind}")
    _check_read_once(activation, "the activated gate")
    if value(activation).dtype in HALF:
        raise NoMatch(f"the activated gate is rounded to {value(activation).dtype}")
    other = next(node for node in found.product.args if node is not activation)
    if str(shape(activation)) != str(shape(other)):
        raise NoMatch(f"gate {tuple(shape(activation))} and {tuple(shape(other))} differ in shape")
    return str(kind)


def _output(found: _Gated, dtype: torch.dtype) -> fx.Node:
    """The last node of the chain that has the gate's dtype and is not a view."""
    first = 0 if found.gate_first else found.chain.index(found.product)
    for node in reversed(found.chain[first:]):
        if callee(node) not in _VIEWS and value(node).dtype is dtype:
            return node
    raise NoMatch(f"it yields {value(found.chain[-1]).dtype}, its gate is {dtype}")


def _above(node: object) -> list[fx.Node]:
    """``node`` and what it is a view, or a float32 copy, of, nearest first."""
    assert isinstance(node, fx.Node)
    found = [node]
    while callee(node) in _VIEWS or cast_source(node) is not node:
        node = node.args[0]
        assert isinstance(node, fx.Node)
        found.append(node)
    return found


def _rows(node: object, width: object) -> list[fx.Node]:
    """Those of ``_above`` with rows of ``width``, in the narrowest dtype."""
    above = _above(node)
    dtype = value(above[-1]).dtype
    return [n for n in above if value(n).dtype is dtype and str(shape(n)[-1:]) == str((width,))]


def _aligned(found: _Gated, output: fx.Node) -> tuple[fx.Node, fx.Node]:
    """``x`` and the gate in one shape, as far up the views as possible: there they are parts of merged products."""
    width = shape(found.product)[-1]
    one_dynamic = sum(map(is_dynamic, shape(output))) <= 1  # so that the result can be viewed as the output
    for x in reversed(_rows(found.x, width)):
        for gate in reversed(_rows(found.activation.args[0], width)):
            same = str(shape(x)) == str(shape(gate))
            if same and (one_dynamic or str(shape(x)) == str(shape(output))):
                return x, gate
    raise NoMatch("its rows and its gate's are views of other shapes")


def _check_operands(x: fx.Node, gate: fx.Node, weight: fx.Node | None, rounded: bool) -> None:
    dtype, width = value(gate).dtype, shape(gate)[-1]
    if value(x).dtype not in (dtype, torch.float32):
        raise NoMatch(f"{value(x).dtype} is normed beside a gate of {dtype}")
    if weight is None:
        return
    if str(shape(weight)) != str((width,)):
        raise NoMatch(f"its scale has the shape {tuple(shape(weight))}, its rows have {width} entries")
    if value(weight).dtype is not dtype and (rounded or value(weight).dtype is not torch.float32):
        raise NoMatch(f"its scale is {value(weight).dtype}, its gate {dtype}")


def _check_groups(width: int | torch.SymInt, size: int) -> None:
    if is_dynamic(width):
        raise NoMatch(f"its gate has rows of the size {width}, which varies from call to call")
    if width % size:
        raise NoMatch("it norms several rows of its gate together")
