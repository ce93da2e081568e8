"""Queries about an FX node traced by Dynamo: what it calls, returns and mutates."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_NAMED_LIKE_INPLACE = {operator.and_, operator.or_, operator.not_, operator.is_}
_INPLACE_OPERATORS = {
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.imatmul,
}

# Calls whose result depends on an argument's shape, dtype or device but never on its elements.
METADATA_CALLS = frozenset(
    "size dim ndimension numel getattr stride new_ones new_zeros new_full new_empty new_tensor "
    "ones_like zeros_like full_like empty_like sym_size is_floating_point element_size get_device".split()
)

# Operators of ATen that cut a tensor along one dim → the position of the argument that says which; 0 by default.
CUT_DIM_AT = {"slice.Tensor": 1, "split.Tensor": 2, "split_with_sizes": 2}

# Parameters of ATen's operators that receive numbers to compute with are of these types; sizes and dims are ints.
_NUMERIC = ("number", "float", "Tensor")

VMAP_BOUNDS = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}


def callee(node: Any) -> str:
    """Name of what ``node`` calls, functions and methods alike ("softmax" for F.softmax and Tensor.softmax);
    the node kind for placeholders and outputs; "" for what is not a node."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_function":
        name = getattr(node.target, "__name__", str(node.target))
        return name.removesuffix(".default")
    if node.op == "call_method":
        return str(node.target)
    return node.op


def value(node: Any) -> Any:
    """Return the fake value that the tracer recorded for ``node``; anything that is not a node is its own value."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def cache_index(node: fx.Node) -> int | None:
    """Number of the cache pair (of ``TracedGraph.caches``) that a graph input belongs to; None for any other node."""
    index: int | None = node.meta.get("cache_index")
    return index


def step_field(node: fx.Node) -> str:
    """Name of the field of ``StepMetadata`` that a graph input receives, of any group; "" for other nodes."""
    field: str = node.meta.get("step_field", "")
    return field


def keep_roles(node: fx.Node, source: fx.Node) -> None:
    """Let the graph input ``node`` receive what ``source``, of another graph, receives."""
    for key in ("cache_index", "step_field"):
        if key in source.meta:
            node.meta[key] = source.meta[key]


def is_tensor(node: Any) -> bool:
    return isinstance(value(node), torch.Tensor)


def shape(node: Any) -> tuple[Any, ...]:
    """Sizes of the node's tensor; () when it is none."""
    v = value(node)
    return tuple(v.shape) if isinstance(v, torch.Tensor) else ()


def is_dynamic(size: Any) -> bool:
    """True for a size that varies from call to call."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, whether it was given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def numbers(node: fx.Node) -> list[float]:
    """The finite numbers other than 0 that an operator computes with, as bounds, factors and fills; no sizes, dims or
    indices."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[float] = []
    for i, parameter in enumerate(node.target._schema.arguments):
        if any(kind in str(parameter.type) for kind in _NUMERIC):
            given = argument(node, i, parameter.name)
            items = given if isinstance(given, list | tuple) else [given]
            found += [float(x) for x in items if isinstance(x, int | float) and not isinstance(x, bool)]
    return [x for x in found if x and math.isfinite(x)]


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors ``node`` writes into, those in a list as ``_foreach_add_`` is given included; operators
    that are not torch's own, such as those that write into caches, count for none."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace != "aten":
        return []
    return written_arguments(node)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors ``node`` writes into, whoever's operator it calls."""
    written: Any = None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        written = [argument(node, i, p.name) for i, p in enumerate(target._schema.arguments) if p.is_write]
    elif target in _INPLACE_OPERATORS:
        written = [x for x in node.args[:1] if is_tensor(x)]
    elif node.op == "call_function":
        name = "" if target in _NAMED_LIKE_INPLACE else getattr(target, "__name__", "")
        inplace = name.endswith("_") and not name.endswith("__")
        first = argument(node, 0, "input") if inplace or _asked_in_place(node) else None
        written = [node.kwargs.get("out"), first]
    elif node.op == "call_method":
        name = str(target)
        inplace = name.endswith("_") and not name.endswith("__")
        written = node.args[:1] if (inplace or name == "__setitem__") and name != "requires_grad_" else None
    found: list[fx.Node] = []
    fx.map_arg(written, found.append)
    return found


def _asked_in_place(node: fx.Node) -> bool:
    """Tell whether a function is called with ``inplace=True``, as ``nn.ReLU(inplace=True)`` calls ``relu``."""
    target: Any = node.target
    place = _place_of_inplace(target) if isinstance(target, types.FunctionType) else None
    return place is not None and argument(node, place, "inplace") is True


@functools.cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def is_pure(target: Any) -> bool:
    """Tell whether a function of an ATen graph returns the same for the same arguments and does nothing else."""
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def storage_key(node: fx.Node) -> int | None:
    """Identity of the storage behind the node's tensor; nodes that alias share it."""
    v = value(node)
    if not isinstance(v, torch.Tensor):
        return None
    try:
        return v.untyped_storage()._cdata
    except NotImplementedError:  # tensors inside vmap have none
        return None


def module_path(node: Any) -> str:
    """Qualified name of the innermost module that ``node`` was traced in, "" when unknown."""
    stack = node.meta.get("nn_module_stack") if isinstance(node, fx.Node) else None
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return path.split("].", 1)[-1] if "]." in path else path


def writers_by_storage(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """In-place nodes, grouped by the storage that they write into."""
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for key in {storage_key(target) for target in mutated_arguments(node)} - {None}:
            writers.setdefault(key, []).append(node)
    return writers


def closure(root: fx.Node, reads: Callable[[fx.Node, fx.Node], bool] = lambda user, node: True) -> list[fx.Node]:
    """Everything that ``root`` is computed from, itself included, in graph order.

    In-place writes into a tensor of the closure belong to it when they come before ``root``.

    Args:
        root: the node to start from.
        reads: ``reads(user, node)`` says whether ``user`` needs ``node``; edges that it refuses are not followed.
    """
    order = {n: i for i, n in enumerate(root.graph.nodes)}
    writers = writers_by_storage(root.graph)
    seen: set[fx.Node] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        pending.extend(n for n in node.all_input_nodes if reads(node, n))
        if (key := storage_key(node)) is not None:
            pending.extend(w for w in writers.get(key, ()) if order[w] < order[root])
    return sorted(seen, key=order.__getitem__)


def eliminate_dead_code(graph: fx.Graph) -> int:
    """Remove nodes that cannot be observed; return how many.

    Unlike ``Graph.eliminate_dead_code`` an in-place write is kept exactly when its tensor can still be seen: it
    aliases a live value or a graph input. Writes into dead temporaries (masks) go with them.
    """
    nodes = list(graph.nodes)
    writers = writers_by_storage(graph)
    input_storages = {storage_key(n) for n in nodes if n.op in ("placeholder", "get_attr")} - {None}
    live: set[fx.Node] = set()
    pending = [n for n in nodes if n.op in ("placeholder", "output")]
    for n in nodes:
        keys = {storage_key(target) for target in mutated_arguments(n)} - {None}
        if keys & input_storages or (not keys and _has_effects(n)):
            pending.append(n)
    while pending:
        n = pending.pop()
        if n in live:
            continue
        live.add(n)
        pending.extend(n.all_input_nodes)
        if callee(n) == "_remove_batch_dim":  # the result of a vmap, whose begin and end nothing refers to
            pending.extend(m for m in nodes if callee(m) in VMAP_BOUNDS)
        key = storage_key(n)
        if key is not None:
            pending.extend(writers.get(key, ()))
    dead = [n for n in reversed(nodes) if n not in live]
    for n in dead:
        graph.erase_node(n)
    return len(dead)


def _has_effects(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
