"""Operators with state in decode steps for Ascend: the single-token form instead of the one over chunks.

Matches:
    what ``lower_npu_states`` made of an operator with state, in a graph whose steps have one token of each sequence
    and no more, and go on from a state
Becomes:
    before = index_select(state, state_read of each token)
    y, after = the unfused operators for one token (``runtime.ops.state.one_token``), rows normalized by npu_rms_norm
    npu_scatter_nd_update_(state, state_write of each token, after)
or, for a gated delta rule with one decay per head whose limits allow it, instead of the unfused operators
    y = npu_recurrent_gated_delta_rule(q, k, v, before, beta, g=log_decay, ...)      # before becomes after
Why it is faster:
    the form over chunks is about 150 launches, most of them of work that one token does not need.

``x · rsqrt(Σ x² + eps)`` over N channels is ``rms_norm(x, eps / N) / √N``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ....runtime.npu_target import NpuTarget
from ....runtime.ops.npu.limits import violations
from ....runtime.ops.npu.limits.states import NOT_IN_GE
from ....runtime.ops.state.chunked_recurrence import normalized
from ....runtime.ops.state.one_token import one_token_conv1d, one_token_recurrence, one_token_scan
from ....runtime.ops.state.state_slots import compute_dtype
from ....runtime.step_metadata import TOKEN_FIELDS
from ...graph.custom_notes import custom_note, put_custom_note
from ...graph.fx_nodes import cache_index, callee, shape, value
from ...graph.traced import TracedGraph
from .call import Call
from .delta_rule_probe import why_wrong
from .site import inline

_npu, _aten = torch.ops.npu, torch.ops.aten
_getitem = operator.getitem
_RESHAPES = frozenset({"view", "reshape", "_unsafe_view"})
INPUT = "pagoda_state_input"
"""Key, in ``node.meta["custom"]``, of the name of an operator's argument that the node is."""
STEP = "pagoda_state_step"
"""Key of the operator whose result the node is, and of its arguments that are no tensors."""
_CONVOLUTION = "causal_conv1d"


def note_input(traced: TracedGraph, name: str, given: fx.Node | None) -> fx.Node | None:
    """A view of an argument by which the single-token form finds it; None where none is given."""
    if given is None:
        return None
    sizes = shape(given)
    tokens = [1, -1] if len(sizes) > 2 else []
    view = traced.call(_aten.reshape.default, given, [*tokens, *map(int, sizes[len(tokens) :])])
    put_custom_note(view, INPUT, name)
    return view


def note_step(traced: TracedGraph, result: fx.Node, kind: str, **numbers: Any) -> None:
    """Note that ``result`` has a single-token form; the graph gets the inputs that this one reads, and that tell its
    steps from others."""
    for field in ("query_lens", "state_reads", *TOKEN_FIELDS):
        traced.step_input(field)
    put_custom_note(result, STEP, {"operator": kind, **numbers})


def unit_gain(traced: TracedGraph, channels: int, scale: float) -> fx.Node:
    """The weight ``[N]`` with which a norm makes rows of length ``scale``; every layer shares it."""
    device, gain = value(traced.placeholder(traced.input_ids)).device, scale * channels**-0.5
    name = f"gain_{channels}_{gain:.9g}".replace(".", "_").replace("-", "m")
    return traced.shared_constant(name, lambda: torch.full((channels,), gain, device=device))


def normalize(traced: TracedGraph, x: fx.Node, eps: float | None, scale: float) -> fx.Node:
    """Rows ``[T, H, N]`` made to have length ``scale``, or as they are without ``eps``, times ``scale``."""
    if eps is None:
        return x if scale == 1.0 else traced.call(_aten.mul.Tensor, x, scale)
    assert traced.npu is not None
    given = x, unit_gain(traced, int(shape(x)[2]), scale), eps / int(shape(x)[2])
    if violations(Call.make(_npu.npu_rms_norm.default, traced.npu, *given)):
        return inline(traced, lambda rows: normalized(rows, eps) * scale, x)  # type: ignore[no-any-return]
    return traced.call(_getitem, traced.call(_npu.npu_rms_norm.default, *given), 0)


def why_no_recurrent_operator(target: NpuTarget) -> str:
    """The reason why no gated delta rule has the vendor's recurrent operator in decode steps; "" where some may."""
    if target.graph_mode == "ge":
        return NOT_IN_GE
    return why_wrong("npu_recurrent_gated_delta_rule", target.tried_on) if target.tried_on else ""


def decode_states(traced: TracedGraph) -> int:
    """Put the single-token form where that was noted, in a graph for steps of one token per sequence; how often.

    Convolutions alone, without a recurrence, stay as they are: they are as short over many tokens.

    Raises:
        ValueError: the nodes of a noted unfused computation have changed.
    """
    sites = [(node, step) for node in traced.graph.nodes if (step := custom_note(node, STEP)) is not None]
    if all(step["operator"] == _CONVOLUTION for _, step in sites):
        return 0
    for result, step in sites:
        numbers = {name: number for name, number in step.items() if name != "operator"}
        given, state = _inputs_of(result)
        writer = next(user for user in state.users if user.target is _npu.npu_scatter_nd_update_.default)
        with traced.before(result):
            read = traced.step_input("token_state_read")
            place = traced.call(_aten.unsqueeze.default, traced.step_input("token_state_write"), -1)
            new, after = _FORMS[step["operator"]](traced, given, state, read, **numbers)
        writer.args = (state, place, after)
        traced.substitute(result, new)
    return len(sites)


def _convolution(
    traced: TracedGraph, given: dict[str, fx.Node], state: fx.Node, read: fx.Node, activation: str
) -> tuple[fx.Node, fx.Node]:
    inputs = given["x"], given["taps"], given.get("bias"), activation
    return inline(traced, one_token_conv1d, *inputs, state, read)  # type: ignore[no-any-return]


def _recurrence(
    traced: TracedGraph,
    given: dict[str, fx.Node],
    state: fx.Node,
    read: fx.Node,
    scale: float,
    l2norm_eps: float | None,
) -> tuple[fx.Node, fx.Node]:
    val, beta = given["value"], given.get("beta")
    fused = _recurrent_operator(traced, given, state, read, scale, l2norm_eps)
    if fused is not None:
        return fused
    query, key, rows = _rows(traced, given, compute_dtype(value(val)))
    query, key = normalize(traced, query, l2norm_eps, scale), normalize(traced, key, l2norm_eps, 1.0)
    made, after = inline(traced, one_token_recurrence, query, key, rows, given["log_decay"], beta, state, read)
    result = inline(traced, lambda x: x.to(value(val).dtype)[None], made)
    return result, after


def _recurrent_operator(
    traced: TracedGraph,
    given: dict[str, fx.Node],
    state: fx.Node,
    read: fx.Node,
    scale: float,
    l2norm_eps: float | None,
) -> tuple[fx.Node, fx.Node] | None:
    """The same by the vendor's operator; None where it is not legal, or the device computes it wrongly."""
    target, overload = traced.npu, _npu.npu_recurrent_gated_delta_rule.default
    decay, beta, val = given["log_decay"], given.get("beta"), given["value"]
    assert target is not None
    if beta is None or len(shape(decay)) != 3 or why_no_recurrent_operator(target):
        return None
    dtype = value(val).dtype
    query, key, rows = _rows(traced, given, dtype)
    q, k = (normalize(traced, x, l2norm_eps, 1.0) for x in (query, key))
    b, g = (
        inline(traced, lambda x, to: x.to(to).reshape(-1, x.shape[2]).contiguous(), x, to)
        for x, to in ((beta, dtype), (decay, torch.float32))
    )
    before = traced.call(_aten.index_select.default, state, 0, read)
    lens, every = (traced.step_input(name) for name in ("token_ones", "token_places"))
    where = {"actual_seq_lengths": lens, "ssm_state_indices": every}
    arguments = (q, k, rows, before), {"beta": b, "scale": scale, "g": g, **where}
    if violations(Call.make(overload, target, *arguments[0], **arguments[1])):
        return None
    result = traced.call(overload, *arguments[0], **arguments[1])
    return traced.call(_aten.unsqueeze.default, result, 0), before


def _scan(
    traced: TracedGraph, given: dict[str, fx.Node], state: fx.Node, read: fx.Node, round_state: bool
) -> tuple[fx.Node, fx.Node]:
    inputs = (given[name] for name in ("x", "dt", "A", "B", "C"))
    return inline(traced, one_token_scan, *inputs, round_state, state, read)  # type: ignore[no-any-return]


_FORMS: dict[str, Callable[..., tuple[fx.Node, fx.Node]]] = {
    _CONVOLUTION: _convolution,
    "linear_recurrence": _recurrence,
    "selective_scan": _scan,
}


def _rows(traced: TracedGraph, given: dict[str, fx.Node], dtype: torch.dtype) -> list[fx.Node]:
    """Query, key and value as ``[T, H, N]`` in one dtype.

    Where they are the parts of one tensor, that one is widened as a whole, and where calls are captured cut into
    dense parts in one launch.
    """
    nodes = [given[name] for name in ("query", "key", "value")]
    sizes = [math.prod(map(int, shape(node)[2:])) for node in nodes]
    whole, is_captured = _whole_of_parts(nodes, sizes), traced.npu is not None and traced.npu.graph_mode == "aclgraph"
    if whole is not None and (is_captured or value(whole).dtype is not dtype):
        if value(whole).dtype is not dtype:
            whole = traced.call(_aten._to_copy.default, whole, dtype=dtype)
        split = _aten.split_with_sizes_copy.default if is_captured else _aten.split_with_sizes.default
        parts = traced.call(split, whole, sizes, -1)
        nodes = [
            traced.call(_aten.reshape.default, traced.call(_getitem, parts, i), [1, -1, *map(int, shape(node)[2:])])
            for i, node in enumerate(nodes)
        ]
    return [inline(traced, lambda x: x.to(dtype).reshape(-1, *x.shape[2:]).contiguous(), node) for node in nodes]


def _whole_of_parts(nodes: list[fx.Node], sizes: list[int]) -> fx.Node | None:
    """The tensor ``[1, T, C]`` whose channels are those of the nodes, one behind the other; None if there is none."""
    found: Any = None
    for i, part in enumerate(nodes):
        node: Any = part
        while callee(node) in _RESHAPES:
            node = node.args[0]
        split: Any = node.args[0] if callee(node) == "getitem" and node.args[1] == i else None
        if callee(split).removesuffix("_copy") != "split_with_sizes" or split.args[1] != sizes:
            return None
        if split.args[2] not in (-1, 2) or len(shape(split.args[0])) != 3 or found not in (None, split):
            return None
        found = split
    return None if found is None else found.args[0]


def _inputs_of(result: fx.Node) -> tuple[dict[str, fx.Node], fx.Node]:
    """The noted arguments that ``result`` is computed from, and the pool of states.

    Raises:
        ValueError: two of a name, or not one pool.
    """
    given: dict[str, fx.Node] = {}
    states: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [result]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        name = custom_note(node, INPUT)
        if cache_index(node) is not None:
            states.add(node)
        elif name is None:
            pending.extend(node.all_input_nodes)
        elif name in given:
            raise ValueError(f"{result.name} has two arguments {name}: not one operator with state")
        else:
            given[name] = node
    if len(states) != 1:
        raise ValueError(f"{result.name} reads {sorted(map(str, states))}: not one operator with state")
    return given, states.pop()
