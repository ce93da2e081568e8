"""Let no token's numbers depend on its batch mates, on how a prompt is cut, or on the number of threads, bit for bit.

Level 0, when requested (``batch_invariant``): the numbers change within rounding.

Matches:
    linear(x, W, b)                          # of any weights, transposed ones too
    cos(x), sin(x), tanh(x), exp(x), sigmoid(x)
    pagoda::paged_attention, pagoda::moe, pagoda::quantized_moe, pagoda::moe_gating
Becomes:
    pagoda::invariant_linear(x, W, b)
    pagoda::elementwise(x, "cos")            # …
    the same operators with batch_invariant=True
Why it is wanted:
    Libraries of matrix products block sums by the number of rows, attention splits keys by what else there is to do,
    and vectorized functions treat the ends of a thread's share differently. Answers then change with the load.

What is left is looked at node by node: operators that copy numbers or round each one by itself, as IEEE 754 says, are
the same everywhere, and so are our own; all others that yield floating-point numbers are refused by name.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ....runtime.ops import OPERATORS
from ....runtime.ops.elementwise import FUNCTIONS, elementwise
from ....runtime.ops.linear.invariant_linear import invariant_linear
from ....runtime.ops.moe.moe import INVARIANT_SCORINGS, moe_gating
from ....runtime.ops.native import FLOAT_CODES, load_kernels
from ...graph.data_movement import MOVES
from ...graph.fx_nodes import argument, callee, eliminate_dead_code, module_path
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph, UnsupportedModel

_aten = torch.ops.aten
_FUNCTIONS = {getattr(_aten, name).default: name for name in FUNCTIONS}
_FLAGGED = {overload for overload in OPERATORS if overload._schema.arguments[-1].name == "batch_invariant"}
_MOVES = frozenset(name.partition(".")[0] for name in MOVES) | frozenset(
    "t chunk narrow contiguous embedding index index_select gather repeat flatten unflatten constant_pad_nd flip "
    "copy lift_fresh_copy as_strided".split()
)
_ROUNDS_ALONE = frozenset(
    "add sub rsub mul div neg abs sqrt rsqrt reciprocal relu maximum minimum clamp clamp_min clamp_max where "
    "masked_fill sign floor ceil round trunc _to_copy "
    "to zeros ones full arange zeros_like ones_like full_like new_zeros "
    "new_ones new_full scalar_tensor amax amin max min square heaviside".split()
)
_SUMS = "sums in an order that depends on sizes and threads"


def make_batch_invariant(traced: TracedGraph) -> PassRecord:
    """Replace what depends on the batch.

    Raises:
        UnsupportedModel: there are no C++ kernels, or an operator is left that cannot be shown to be invariant.
    """
    record = PassRecord("make_batch_invariant")
    if load_kernels() is None:
        raise UnsupportedModel("batch_invariant=True needs the C++ kernels; install g++, or omit it")
    for node in list(traced.graph.nodes):
        new = _replacement(traced, node)
        if new is not None:
            traced.substitute(node, new)
            record.matches += 1
        elif node.target in _FLAGGED:
            record.matches += _flag(node)
    eliminate_dead_code(traced.graph)
    for node in traced.graph.nodes:
        reason = _refusal(node)
        if reason:
            where = f" in {path}" if (path := module_path(node)) else ""
            raise UnsupportedModel(
                f"batch_invariant=True is not possible: {node.target}{where} {reason}; omit it, or enable the "
                "passes that recognize such operators (opt_level=2)"
            )
    return record


def _replacement(traced: TracedGraph, node: fx.Node) -> fx.Node | None:
    """The node that takes the place of one; None for nothing."""
    if node.target is _aten.linear.default:
        given = (argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias"))
        with traced.before(node):
            return traced.call(invariant_linear, *given)
    if node.target in _FUNCTIONS:
        with traced.before(node):
            return traced.call(elementwise, argument(node, 0, "self"), _FUNCTIONS[node.target])
    return None


def _flag(node: fx.Node) -> bool:
    """Ask an operator for its invariant form; False if it was asked before."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = [argument(node, i, name) for i, name in enumerate(names[:-1])]
    if argument(node, len(names) - 1, names[-1]):
        return False
    node.args, node.kwargs = (*given, True), {}
    return True


def _refusal(node: fx.Node) -> str:
    """The reason why a node's numbers may depend on the batch; "" if they do not."""
    if node.op not in ("call_function", "call_method"):
        return ""
    own = OPERATORS.get(node.target)  # type: ignore[call-overload]
    if own and not own.facts.invariant:
        return _SUMS
    dtypes = {x.dtype for x in _tensors(node.meta.get("val", node.meta.get("example_value")))}
    dtypes = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    if not dtypes or node.target is operator.getitem:
        return ""
    name = callee(node).partition(".")[0]
    if own:
        if node.target is moe_gating and (unknown := {node.args[3], node.args[7]} - INVARIANT_SCORINGS):
            return f"has no invariant form of {', '.join(sorted(map(str, unknown)))}"
        wide = dtypes - set(FLOAT_CODES)
        return f"has no kernel for {wide.pop()}" if wide else ""
    if name in ("add", "sub", "rsub") and argument(node, 2, "alpha", 1) != 1:
        return "multiplies and adds, which is rounded either once or twice"
    if name == "rsqrt" and dtypes != {torch.float32}:
        return "is rounded once in vectors and twice in single numbers"
    if name in _MOVES or name in _ROUNDS_ALONE:
        return ""
    if name == "pow":
        return (
            "" if argument(node, 1, "exponent") == 2 else "is rounded differently at the boundaries between threads"
        )
    if name in ("mm", "bmm", "addmm", "baddbmm", "matmul", "einsum", "sum", "mean", "softmax", "_softmax", "cumsum"):
        return _SUMS
    return "is not known to be invariant"


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    return [x for entry in found for x in _tensors(entry)] if isinstance(found, list | tuple) else []
