"""ATen graphs made of Dynamo's: few operators, no Python methods, no in-place writes but those into inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import keep_roles, value
from ...runtime.phases import phase


@phase("aten")
def to_aten(traced: TracedGraph, context: TracingContext) -> TracedGraph:
    """The same computation over ATen and ``pagoda::`` operators, as AOTAutograd traces it for inference.

    Nothing is decomposed that torch's dispatcher does not decompose by itself (``silu`` and ``layer_norm`` survive,
    ``linear`` becomes views and a product). Placeholders keep their order and names. Operators that write into graph
    inputs are called directly; no other writes are left.

    Args:
        traced: a graph of Dynamo's, with parameters as inputs; it is not changed.
        context: the context that it was traced in.
    """
    traced.recompile()
    caught: dict[str, fx.GraphModule] = {}

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        caught["gm"] = gm
        return lambda *args: None

    with tracing(context), torch.no_grad():
        examples = [value(node) for node in traced.placeholders]
        aot_module_simplified(
            traced.module, examples, fw_compiler=keep, decompositions={}, keep_inference_input_mutations=True
        )
    gm = caught["gm"]
    module = fx.GraphModule(gm, gm.graph)
    result = traced.over(module)
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta.pop("val")
    for node, source in zip(result.placeholders, traced.placeholders, strict=True):
        node._rename(source.name)
        node.target = source.name
        if node.name != source.name:
            raise ValueError(f"a node of the ATen graph is called {source.name} like a graph input")
        node.meta["example_value"] = value(source)
        keep_roles(node, source)
        node._dynamo_source = getattr(source, "_dynamo_source", None)  # type: ignore[attr-defined]
    write_in_place(result)
    return result


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
