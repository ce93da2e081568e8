"""Let linear layers that read one input run as one product over one merged weight.

Level 2: a product over more columns may add up in another order.

Matches:
    linear(x, W1, b1), linear(x, W2, b2), ...        # one module's: query, key and value; gate and up
Becomes:
    y = linear(x, [W1; W2; ...], [b1; b2; ...])      # a new graph input holds the rows of all
    slice(y, -1, 0, n1), slice(y, -1, n1, n1 + n2), ...
Why it is faster:
    A product on few rows costs a fixed time beyond its work, and the small matrices of grouped KV heads do not fill
    the cores. The input is read once.

The pass touches no weights. It notes which inputs are to be merged; when the graph is linked, the parameters become
views of the merged tensor, so that memory does not grow (see ``compiler.weights.merged_weights``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...runtime.ops.linear.stored_weight import StoredWeight
from ..graph.data_movement import RESHAPES
from ..graph.fx_nodes import argument, callee, eliminate_dead_code, module_path, shape, value
from ..graph.record import PassRecord
from ..graph.traced import TracedGraph

_aten = torch.ops.aten
# A linear whose result one of these turns into a choice of experts is a router: it stays a layer of its own.
_ROUTES = frozenset({"_softmax", "topk", "sigmoid"})
_PASSES_THROUGH = RESHAPES | {"_to_copy", "add.Tensor", "div.Tensor", "mul.Tensor"}


def merge_linears(traced: TracedGraph) -> PassRecord:
    """Merge the linears of each module that read the same input.

    ``traced.notes.merged`` maps the name of each new graph input to the names of the inputs that are its rows.
    """
    record = PassRecord("merge_linears")
    families: dict[Any, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        if node.target is _aten.linear.default:
            families.setdefault((_input(node), _parent(node)), []).append(node)
    families = {key: nodes for key, nodes in families.items() if len(nodes) > 1}
    if not families:
        return record
    groups = _groups(traced, list(families.values()), record)
    if not groups:
        return record
    slices: set[fx.Node] = set()
    inputs: dict[tuple[fx.Node, ...], fx.Node] = {}
    for nodes in groups:
        slices |= _merge(traced, nodes, inputs)
    _settle_layouts(traced, slices)
    eliminate_dead_code(traced.graph)
    record.matches = len(groups)
    return record


def _groups(traced: TracedGraph, families: list[list[fx.Node]], record: PassRecord) -> list[list[fx.Node]]:
    """Linears of each family that can be merged, in groups; a rejection for each that has to stay."""
    groups: list[list[fx.Node]] = []
    aliased = _aliased(traced)
    for nodes in families:
        fitting: dict[Any, list[fx.Node]] = {}
        for node in nodes:
            reason = _refusal(traced, node, aliased)
            if reason:
                record.reject(node, reason)
            elif reason is not None:
                fitting.setdefault(_kind(traced, node), []).append(node)
        for kind, alike in fitting.items():
            if len(alike) > 1:
                groups.append(alike)
            elif len(fitting) > 1:
                record.reject(alike[0], f"its neighbors differ from it: {_difference(kind, list(fitting))}")
    # A layer that runs several times has one group for each, with the same parameters; nothing else may read them.
    while True:
        readers: dict[tuple[fx.Node, ...], set[fx.Node]] = {}
        for nodes in groups:
            readers.setdefault(_parameters(nodes), set()).update(nodes)
        kept: list[list[fx.Node]] = []
        for nodes in groups:
            own = readers[_parameters(nodes)]
            others = [_reader_outside(node, own) for node in nodes]
            for node, other in zip(nodes, others, strict=True):
                if other is not None:
                    record.reject(node, f"{module_path(other) or other.name} also reads one of its parameters")
            kept.append([node for node, other in zip(nodes, others, strict=True) if other is None])
        settled = kept == groups
        groups = [nodes for nodes in kept if len(nodes) > 1]
        if settled:
            return groups


def _parameters(nodes: list[fx.Node]) -> tuple[fx.Node, ...]:
    """Graph inputs that the linears read, weights first."""
    weights = [argument(node, 1, "weight") for node in nodes]
    return *weights, *(bias for node in nodes if (bias := argument(node, 2, "bias")) is not None)


def _reader_outside(node: fx.Node, readers: set[fx.Node]) -> fx.Node | None:
    """A node that reads a parameter of ``node`` and is not among ``readers``, or reads it in their own group too."""
    for parameter in _parameters([node]):
        for user in parameter.users:
            if user not in readers:
                return user
            if user is not node and user.args[0] is node.args[0]:
                return user
    return None


def _input(node: fx.Node) -> Any:
    """Identity of what a linear reads; views that are spelled alike are the same."""
    x = node.args[0]
    if isinstance(x, fx.Node) and callee(x) in ("view", "_unsafe_view"):
        sizes = tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in shape(x))
        return x.args[0], sizes
    return x


def _parent(node: fx.Node) -> str:
    return module_path(node).rpartition(".")[0]


def _refusal(traced: TracedGraph, node: fx.Node, aliased: Mapping[str, str]) -> str | None:
    """The reason why a linear with neighbors cannot be merged; "" when it can, None when nobody would expect it."""
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    if isinstance(weight, fx.Node) and weight.name in traced.notes.merged:
        return None
    if _is_router(node):
        return None
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if callee(parameter) == "t" and getattr(parameter.args[0], "name", "") in traced.constants:
            return f"its {what} is stored transposed"
        if not isinstance(parameter, fx.Node) or parameter.name not in traced.constants:
            return f"its {what} is computed, not a parameter"
        tensor = traced.constants[parameter.name]
        if not _is_plain(tensor) and not isinstance(tensor, StoredWeight):
            return f"its {what} is a {type(tensor).__name__} on {tensor.device}, whose memory cannot be moved"
        if not tensor.is_contiguous():
            return f"its {what} is not contiguous"
        if parameter.name in aliased:
            return f"its {what} shares memory with {aliased[parameter.name]}"
    return ""


def _is_router(node: fx.Node) -> bool:
    """Tell whether the result, but for casts, scales and offsets, is what a softmax or a choice of the best reads."""
    pending, seen = list(node.users), 0
    while pending and seen < 16:
        user = pending.pop()
        seen += 1
        if callee(user) in _ROUTES:
            return callee(user) != "sigmoid" or shape(node)[-1] == 1
        if callee(user) in _PASSES_THROUGH and len(user.all_input_nodes) == 1:
            pending.extend(user.users)
    return False


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def _aliased(traced: TracedGraph) -> dict[str, str]:
    """Inputs that overlap in memory, each with the name of another one."""
    spans = []
    for name, tensor in traced.constants.items():
        if name not in traced.notes.merged and _is_plain(tensor) and tensor.numel():
            start = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), name))
    aliased: dict[str, str] = {}
    furthest: tuple[str, int, int, str] | None = None
    for span in sorted(spans):
        if furthest is not None and span[0] == furthest[0] and span[1] < furthest[2]:
            aliased[span[3]] = furthest[3]
            aliased.setdefault(furthest[3], span[3])
        if furthest is None or span[0] != furthest[0] or span[2] > furthest[2]:
            furthest = span
    return aliased


def _kind(traced: TracedGraph, node: fx.Node) -> tuple[Any, ...]:
    """The properties that linears must have in common to be merged."""
    bias = argument(node, 2, "bias")
    weight = traced.constants[argument(node, 1, "weight").name]
    stored = weight.stored_as if isinstance(weight, StoredWeight) else None
    kind = (stored, weight.dtype, weight.device, weight.is_inference())
    if bias is None:
        return *kind, None
    joined = traced.constants[bias.name]
    return *kind, (joined.dtype, joined.device, joined.is_inference())


def _difference(kind: tuple[Any, ...], kinds: list[tuple[Any, ...]]) -> str:
    other = next(k for k in kinds if k != kind)
    if kind[0] != other[0]:
        return "the formats of their weights"
    if (kind[-1] is None) != (other[-1] is None):
        return "they have a bias" if kind[-1] is None else "they have no bias"
    return "dtype, device or inference mode of their parameters"


def _merge(traced: TracedGraph, nodes: list[fx.Node], inputs: dict[tuple[fx.Node, ...], fx.Node]) -> set[fx.Node]:
    """One linear in place of several; returns the slices of its result.

    ``inputs`` holds the merged inputs so far: parameters → input.
    """
    first, parameters = nodes[0], _parameters(nodes)
    with traced.before(first):
        arguments = [first.args[0]]
        for at in range(0, len(parameters), len(nodes)):
            alike = parameters[at : at + len(nodes)]
            if alike not in inputs:
                inputs[alike] = _merged_input(traced, alike)
            arguments.append(inputs[alike])
        whole = traced.graph.call_function(_aten.linear.default, tuple(arguments))
    whole.meta = dict(first.meta)
    with traced.fake_mode, torch.no_grad():
        whole.meta["example_value"] = value(first).new_empty((*shape(first)[:-1], shape(arguments[1])[0]))
    axis, start, slices = len(shape(whole)) - 1, 0, set()
    for node in nodes:
        size = shape(node)[-1]
        with traced.before(node), traced.graph.inserting_after(whole):
            part = traced.call(_aten.slice.Tensor, whole, axis, start, start + size)
        node.replace_all_uses_with(part)
        traced.graph.erase_node(node)
        slices.add(part)
        start += size
    return slices


def _merged_input(traced: TracedGraph, parameters: tuple[fx.Node, ...]) -> fx.Node:
    """A new graph input, one parameter's rows above the next one's."""
    name = f"merged_{parameters[0].name}"
    sources = tuple(parameter.name for parameter in parameters)
    traced.notes.merged[name] = sources
    with traced.fake_mode:
        example = torch.cat([value(parameter).detach() for parameter in parameters])
    return traced.add_deferred_constant(name, example)


def _settle_layouts(traced: TracedGraph, changed: set[fx.Node]) -> None:
    """Compute anew what depends on the strides of ``changed``, with copies where an operator needs other ones."""
    changed = set(changed)
    for node in list(traced.graph.nodes):
        inputs = [n for n in node.all_input_nodes if n in changed]
        if node.op != "call_function" or not inputs:
            continue
        before = _layout(node)
        if node.target is _aten.as_strided.default:
            _copy_inputs(traced, node, inputs)
        try:
            traced.propagate(node)
        except (RuntimeError, ValueError):  # a view that these strides do not allow
            _copy_inputs(traced, node, inputs)
            traced.propagate(node)
        if _layout(node) != before:
            changed.add(node)


def _copy_inputs(traced: TracedGraph, node: fx.Node, inputs: list[fx.Node]) -> None:
    with traced.before(node):
        for source in inputs:
            copy = traced.call(_aten.clone.default, source, memory_format=torch.contiguous_format)
            node.replace_input_with(source, copy)


def _layout(node: fx.Node) -> list[Any]:
    """Strides of all tensors that a node yields."""
    return [
        [s.node.expr if isinstance(s, torch.SymInt) else s for s in tensor.stride()]
        for tensor in pytree.tree_leaves(value(node))
        if isinstance(tensor, torch.Tensor)
    ]
