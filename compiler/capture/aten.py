"""Converts Dynamo graphs to ATen graphs: few operators, no Python methods, in-place writes into inputs only."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.fx.traceback import preserve_node_meta

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import callee, is_dynamic, keep_roles, shape, storage_key, value, written_arguments
from ...runtime.phases import phase


@phase("aten")
def to_aten(traced: TracedGraph, context: TracingContext) -> TracedGraph:
    """The same computation over ATen and ``pagoda::`` operators, as AOTAutograd traces it for inference.

    Decomposes only what torch's dispatcher decomposes by itself (``silu`` and ``layer_norm`` stay, ``linear`` becomes
    views and a product). Placeholders keep their order and names. Operators that write into graph inputs are called
    directly; no other writes remain.

    Args:
        traced: a Dynamo graph with parameters as inputs; not modified.
        context: the context of the tracing.
    """
    traced.recompile()
    with tracing(context), torch.no_grad():
        if not any(_writes_through_view(node) for node in traced.graph.nodes):
            result = _named_alike(_trace(traced), traced)
            _multiply_sizes(result)
            if _replace_writes(result):
                return result
        result = _named_alike(_trace_functionally(traced), traced)
    write_in_place(result)
    return result


def _writes_through_view(node: fx.Node) -> bool:
    """Tell whether a node of Dynamo's graph surely writes into a part of a tensor that is read as a whole later."""
    if callee(node) != "setitem":
        return callee(node) == "copy_"
    index = node.args[1]
    return any(not isinstance(part, fx.Node) for part in (index if isinstance(index, tuple) else (index,)))


def _trace(traced: TracedGraph) -> fx.GraphModule:
    """Trace one run of the graph. Writes stay what they are: AOTAutograd's view of them takes a second run and
    several times as long, and few graphs have any."""

    def run(*inputs: Any) -> Any:
        with preserve_node_meta():
            return PropagateUnbackedSymInts(traced.module).run(*inputs)

    examples = [value(node) for node in traced.placeholders]
    with traced.fake_mode, enable_python_dispatcher():
        return make_fx(run, decomposition_table={})(*examples)


def _trace_functionally(traced: TracedGraph) -> fx.GraphModule:
    """Let AOTAutograd trace the graph, which takes writes out of it and calls operators that write on copies."""
    caught: dict[str, fx.GraphModule] = {}

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        caught["gm"] = gm
        return lambda *args: None

    examples = [value(node) for node in traced.placeholders]
    aot_module_simplified(
        traced.module, examples, fw_compiler=keep, decompositions={}, keep_inference_input_mutations=True
    )
    return caught["gm"]


def _named_alike(gm: fx.GraphModule, source: TracedGraph) -> TracedGraph:
    """A graph over the inputs of ``source``."""
    module = fx.GraphModule(gm, gm.graph)
    result = source.over(module)
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta.pop("val")
    for node, origin in zip(result.placeholders, source.placeholders, strict=True):
        node._rename(origin.name)
        node.target = origin.name
        if node.name != origin.name:
            raise ValueError(f"a node of the ATen graph has the name {origin.name} of a graph input")
        node.meta["example_value"] = value(origin)
        keep_roles(node, origin)
        node._dynamo_source = getattr(origin, "_dynamo_source", None)  # type: ignore[attr-defined]
    return result


def _multiply_sizes(traced: TracedGraph) -> None:
    """Compute numbers of elements from sizes, those of the first tensors that have them, as AOTAutograd's tracing
    does: then no more nodes read a tensor than those that read its elements."""
    sizes: dict[Any, tuple[fx.Node, int]] = {}
    for node in list(traced.graph.nodes):
        for dim, size in enumerate(shape(node)):
            if is_dynamic(size):
                sizes.setdefault(size.node.expr, (node, dim))
        if node.target is not torch.ops.aten.sym_numel.default:
            continue
        with traced.before(node):
            count: Any = math.prod(int(size) for size in shape(node.args[0]) if not is_dynamic(size))
            for size in shape(node.args[0]):
                if is_dynamic(size):
                    factor = traced.call(torch.ops.aten.sym_size.int, *sizes[size.node.expr])
                    count = traced.call(operator.mul, factor, count)
        node.replace_all_uses_with(count)
        traced.graph.erase_node(node)


def _replace_writes(traced: TracedGraph) -> bool:
    """Call operators that return what others write into temporaries, and take dead code out.

    False, with the graph half edited, where that may not be the same: a graph input is written to by an operator of
    torch's, a temporary by one of ours, or another view of it is read afterwards.
    """
    order = {node: index for index, node in enumerate(traced.graph.nodes)}
    storage = {node: storage_key(node) for node in order}
    views: dict[int | None, list[fx.Node]] = {}
    for node, key in storage.items():
        views.setdefault(key, []).append(node)
    for node in order:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        written = written_arguments(node)
        if node.target.namespace != "aten":
            if any(argument.op != "placeholder" for argument in written):
                return False
            _give_all_arguments(node)
            continue
        # Tracing lets what is read of the tensor later read what the write returns.
        aliases = [alias for argument in written for alias in views[storage[argument]] if alias is not node]
        if any(alias.op in ("placeholder", "get_attr") for alias in aliases):
            return False
        earlier = [alias for alias in aliases if order[alias] < order[node]]
        if any(order[user] > order[node] for alias in earlier for user in alias.users):
            return False
        if not _return_instead(traced, node):
            return False
    traced.graph.eliminate_dead_code()
    return True


def _give_all_arguments(node: fx.Node) -> None:
    """Name the defaults that tracing leaves out at the end: passes read arguments by their place."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    rest = [node.kwargs.get(argument.name, argument.default_value) for argument in arguments[len(node.args) :]]
    node.args, node.kwargs = (*node.args, *rest), {}


def _return_instead(traced: TracedGraph, node: fx.Node) -> bool:
    """Let ``node`` call the operator that returns what it writes; False if none yields the same form."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    overload = getattr(packet, target._overloadname, None)
    if overload is None or len(overload._schema.arguments) != len(target._schema.arguments):
        return False
    before = _form(node)
    node.target = overload
    traced.propagate(node)
    return _form(node) == before


def _form(node: fx.Node) -> tuple[Any, ...]:
    example = value(node)
    return example.dtype, str(tuple(example.shape)), str(example.stride())


def write_in_place(traced: TracedGraph) -> None:
    """Call operators that write into graph inputs directly, instead of on copies that are written back at the end."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is auto_functionalized_v2:
            _call_directly(traced, node)
    for node in list(graph.nodes):
        if (
            node.op == "call_function"
            and node.target is torch.ops.aten.copy_.default
            and node.args[0] is node.args[1]
        ):
            graph.erase_node(node)


def _call_directly(traced: TracedGraph, node: fx.Node) -> None:
    target: Any = node.args[0]
    kwargs = dict(node.kwargs)
    bases = kwargs.pop("_all_bases")
    assert isinstance(bases, list | tuple)
    if any(not isinstance(base, fx.Node) or base.op != "placeholder" for base in bases):
        return  # a temporary: the functional form is right as it is
    args = []
    for argument in target._schema.arguments:
        key = f"_{argument.name}_base_index"  # there for what is written to; None where that was not given
        if key not in kwargs:
            args.append(kwargs.pop(argument.name))
        else:
            index = kwargs.pop(key)
            args.append(None if index is None else bases[index])
    assert not kwargs, f"{target}: {sorted(kwargs)}"
    with traced.graph.inserting_before(node):
        call = traced.graph.call_function(target, tuple(args))
    call.meta = dict(node.meta)
    returns = len(target._schema.returns)
    results = {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
    if returns == 1 and 0 in results:
        call.meta["example_value"] = value(results[0])
        results.pop(0).replace_all_uses_with(call)
    elif returns > 1:
        call.meta["example_value"] = tuple(value(node)[:returns])
        for i in [i for i in results if i < returns]:
            results.pop(i).replace_input_with(node, call)
    for i, user in results.items():
        user.replace_all_uses_with(bases[i - max(1, returns)])
    for user in list(node.users):
        traced.graph.erase_node(user)
    traced.graph.erase_node(node)
