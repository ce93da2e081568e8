"""Let operators write into graph inputs directly after AOTAutograd has made them functional.

Matches:
    results = npu_X_functional(..., cache, ...)      # npu_X is documented to write into cache
    r = results[i]
    copy_(cache, r)                                  # at the end
    s = npu_scatter_nd_update(pool, ...)             # which returns nothing else
    copy_(pool, s)
Becomes:
    npu_X(..., cache, ...)                           # r's readers read cache
    s = npu_scatter_nd_update_(pool, ...)            # whose readers still read what it returns: GE orders by edges

npugraph_ex undoes the functional form for three operators only (torchair documentation, npugraph_ex, "inplace_pass":
``npu_kv_rmsnorm_rope_cache_v2``, ``npu_mla_prolog_v3``, ``npu_add_rms_norm_v2``); any other copies its cache out and
back in every step. Torchair's own pass for GE graphs leaves the copy of an input that is read before it is written,
as states are; its converter of ``npu_scatter_nd_update_`` makes none.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_npu = torch.ops.npu
_SUFFIX = "_functional"


def write_in_place(gm: fx.GraphModule, example_inputs: Any = None, config: Any = None) -> None:
    """Edit ``gm``; with the arguments of a ``post_grad_custom_pre_pass`` of npugraph_ex.

    A call stays functional unless each of its results is copied back into the very input that it came from, which is
    written once, and nothing reads that input's old contents afterwards.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        direct = _direct(node.target) if node.op == "call_function" else None
        if direct is not None:
            _write_directly(gm.graph, node, direct, order)
    write_rows_in_place(gm)


def write_rows_in_place(gm: fx.GraphModule, example_inputs: Any = None, config: Any = None) -> None:
    """The part of ``write_in_place`` that writes rows of pools, for GE graphs; arguments and conditions as there."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is _npu.npu_scatter_nd_update.default:
            _write_rows_directly(gm.graph, node, order)
    gm.graph.lint()
    gm.recompile()


def _direct(target: Any) -> torch._ops.OpOverload | None:
    """The operator that writes in place what ``target`` returns."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "npu":
        return None
    name = target._schema.name.partition("::")[2]
    packet = getattr(torch.ops.npu, name.removesuffix(_SUFFIX), None) if name.endswith(_SUFFIX) else None
    return None if packet is None else getattr(packet, target._overloadname, None)


def _write_directly(graph: fx.Graph, node: fx.Node, direct: torch._ops.OpOverload, order: dict[fx.Node, int]) -> None:
    parameters, returns = direct._schema.arguments, len(direct._schema.returns)
    written = [i for i, p in enumerate(parameters) if p.alias_info is not None and p.alias_info.is_write]
    if any(user.target is not operator.getitem for user in node.users):
        return
    results: dict[int, list[fx.Node]] = {}
    for user in node.users:
        results.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
    # A functional operator returns what the direct one does, and then what that one writes, in order.
    places: dict[int, fx.Node] = {}
    copies = []
    for k, i in enumerate(written):
        place = node.args[i] if i < len(node.args) else node.kwargs.get(parameters[i].name)
        if not isinstance(place, fx.Node) or place.op != "placeholder" or place in places.values():
            return
        copy = _copied_back(place, *results.get(returns + k, []))
        if copy is None or any(order[u] > order[node] for u in place.users if u is not copy):
            return
        places[returns + k] = place
        copies.append(copy)
    if not places or any(k >= returns + len(written) for k in results):
        return
    for copy in copies:
        copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
        graph.erase_node(copy)
    for k, place in places.items():
        for result in results[k]:
            result.replace_all_uses_with(place)
            graph.erase_node(result)
    node.target = direct
    if returns == 1:
        for result in results.get(0, []):
            result.replace_all_uses_with(node)
            graph.erase_node(result)
    if "val" in node.meta:
        kept = tuple(node.meta["val"])[:returns]
        node.meta["val"] = kept if returns > 1 else (kept[0] if kept else None)


def _copied_back(place: fx.Node, *results: fx.Node) -> fx.Node | None:
    """The only copy into a graph input, if it is one of any of ``results``."""
    copies = [u for u in place.users if u.target is torch.ops.aten.copy_.default and u.args[0] is place]
    return copies[0] if len(copies) == 1 and copies[0].args[1] in results else None


def _write_rows_directly(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> None:
    place = node.args[0]
    if not isinstance(place, fx.Node) or place.op != "placeholder":
        return
    copy = _copied_back(place, node)
    if copy is None or any(order[user] > order[node] for user in place.users if user is not copy):
        return
    copy.replace_all_uses_with(place)
    graph.erase_node(copy)
    node.target = _npu.npu_scatter_nd_update_.default
