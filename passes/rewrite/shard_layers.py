"""Let several ranks hold one layer together: each computes with a part of its heads, features and experts.

Matches:
    y = linear(f(linear(x, W1), linear(x, W2), ...), W)    # f: attention, a recurrence or an activation
    y = moe(x, weights, ids, up, down)
Becomes:                                                  # on every rank
    y = all_reduce(linear(f(linear(x, W1[part]), ...), W[:, part]))
    y = all_gather(linear(all_gather(f(...)), W[part]))    # W has inputs that cannot be parted, as with act-order
    y = all_reduce(moe(x, weights, local_experts(ids), up[part], down[part]))
Why:
    a model that is too large for one device fits on several, and each reads its part of the weights only.

Level 0: what is cut at all is asked for.

The pass walks from each closing linear back to the linears that make what it reads (``sharding.walk``). An operator
between needs a rule; without one the layer stays whole on every rank, with the reason. Sizes that do not divide are
padded with zeros, so that all ranks run one graph. Reductions that are added to each other become one.

Megatron-LM (Shoeybi et al. 2019) cuts layers so; here no list of modules says where.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from ...runtime.ops.arguments import MoeArguments
from ...runtime.ops.collectives import GROUP
from ...runtime.program import StateSpec
from ..graph.cut import Cut, Indices, Refused, counted_once, deal, deal_heads
from ..graph.data_movement import RESHAPES
from ..graph.fx_nodes import cache_index, callee, eliminate_dead_code, is_dynamic, shape, value
from ..graph.notes import Part
from ..graph.record import PassRecord
from ..graph.traced import TracedGraph, UnsupportedModel
from ..sharding.attention import ATTENTION
from ..sharding.elementwise import ELEMENTWISE
from ..sharding.experts import hold_experts
from ..sharding.norms import NORMS, ROTATIONS
from ..sharding.slices import column_unit, part_of
from ..sharding.states import STATES
from ..sharding.views import SPLITS, VIEWS
from ..sharding.walk import Walk

_aten, _pagoda = torch.ops.aten, torch.ops.pagoda
_RULES = {**VIEWS, **ELEMENTWISE, **NORMS, **ATTENTION, **STATES}
_ITEMS = {**SPLITS, **ROTATIONS}
_BY_ROWS = (NORMS.keys() | ELEMENTWISE.keys()) - {"linear"}
_MOST_TRIES = 4


def shard_layers(traced: TracedGraph) -> PassRecord:
    """Cut the layers for ``traced.ranks`` and leave the part of ``traced.rank``.

    ``traced.notes.parts`` says of which tensors the graph's inputs receive parts.

    Raises:
        UnsupportedModel: more groups of experts are asked for than there are experts.
    """
    record = PassRecord("shard_layers")
    if traced.ranks == 1:
        return record
    asked = traced.expert_groups
    if asked is not None and asked > 1 and not any(node.target is _pagoda.moe.default for node in traced.graph.nodes):
        raise UnsupportedModel(f"expert_parallel_size={asked}: no routed experts were found in the model; omit it")
    _fold_heads_late(traced)
    _join_views(traced.graph)
    walks: list[tuple[fx.Node, Walk]] = []
    taken: set[fx.Node] = set()
    for node in reversed(list(traced.graph.nodes)):
        if node in taken:
            continue
        try:
            if node.target is _aten.linear.default and _is_computed(node.args[0]):
                walk = _closed_by(traced, node)
            elif node.target is _pagoda.moe.default:
                hold_experts(walk := _walk(traced), node)
            else:
                continue
            if walk is None:
                continue
            if shared := taken & (walk.cuts.keys() - set(traced.placeholders)):
                raise Refused(f"{next(iter(shared)).name} is cut for another layer already")
        except Refused as reason:
            record.reject(node, str(reason))
            continue
        walks.append((node, walk))
        taken |= walk.cuts.keys() - set(traced.placeholders)
        taken.update(walk.closers)
    if walks:
        _apply(traced, walks)
        record.matches = len(walks)
    return record


def _is_computed(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op != "placeholder"


def _walk(traced: TracedGraph, *, gathers: bool = False) -> Walk:
    return Walk(traced, traced.ranks, _RULES, _ITEMS, gathers=gathers)


def _closed_by(traced: TracedGraph, linear: fx.Node) -> Walk | None:
    """The region that a linear closes; None where nothing is computed between it and the linears before.

    Raises:
        Refused: it has to stay whole.
    """
    size = int(shape(linear.args[0])[-1])
    unit, gathers = column_unit(_stored(traced, linear.args[1])), False
    indices: Indices = deal(size, unit, traced.ranks)
    for _ in range(_MOST_TRIES):
        walk = _walk(traced, gathers=gathers)
        try:
            return walk.run(linear, indices)
        except Refused as reason:
            if reason.gathers and not gathers and (unit == 1 or reason.unit == 1 or unit % reason.unit == 0):
                unit, gathers = 1, True
                indices = deal(size, unit, traced.ranks)
                continue
            if reason.heads is not None and size % reason.heads[0] == 0:
                head_dim = size // reason.heads[0]
                if head_dim % unit and unit % head_dim == 0 and unit > head_dim:
                    raise
                found = deal_heads(*reason.heads, head_dim, traced.ranks)
            elif reason.unit > 1:
                unit = math.lcm(unit, reason.unit)
                found = deal(size, unit, traced.ranks)
            else:
                found = indices
            if Cut(0, found) == Cut(0, indices):
                if walk.holds or (walk.works and walk.opened):
                    raise
                return None
            indices = found
    raise Refused("no part of its inputs was found that ranks can hold")


def _stored(traced: TracedGraph, weight: Any) -> Any:
    """The tensor that a linear's weight is, or is a transpose of."""
    while callee(weight) == "t":
        weight = weight.args[0]
    return traced.constants.get(weight.name)


def _apply(traced: TracedGraph, walks: list[tuple[fx.Node, Walk]]) -> None:
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    for _, walk in walks:
        walk.apply()
    _hold_parts(traced, [walk for _, walk in walks])
    for node, walk in sorted(walks, key=lambda entry: order[entry[0]]):
        if walk.expert_groups > 1:
            _count_locally(traced, node, walk.expert_groups)
        for closer in walk.closers or [node]:
            (_gather if walk.gathers else _reduce)(traced, closer)
    for _, walk in walks:
        for norm, counted in walk.sums:
            _split_norm(traced, norm, counted)
    _propagate(traced)
    _join_reductions(traced)
    eliminate_dead_code(traced.graph)


def _hold_parts(traced: TracedGraph, walks: list[Walk]) -> None:
    """Let the graph's inputs receive parts: those that everything reads alike in place, others in inputs of their
    own."""
    wanted: dict[fx.Node, dict[Cut, set[fx.Node]]] = {}
    for walk in walks:
        for node, cut in walk.cuts.items():
            if node.op == "placeholder":
                wanted.setdefault(node, {}).setdefault(cut, set()).update(walk.users[node])
    for node, cuts in wanted.items():
        if cache_index(node) is not None:
            _hold_cache(traced, node)
            continue
        whole = traced.constants[node.name]
        for number, (cut, users) in enumerate(cuts.items()):
            part = part_of(whole, cut, traced.rank)
            if len(cuts) == 1 and users == set(node.users):
                held = node
                traced.constants[node.name] = part
                with traced.fake_mode:
                    node.meta["example_value"] = torch.empty(part.shape, dtype=part.dtype, device=value(node).device)
            else:
                held = traced.add_constant(f"part_{number}_of_{node.name}", part)
                for user in users:
                    user.replace_input_with(node, held)
            traced.notes.parts[held.name] = Part(whole, cut)


def _hold_cache(traced: TracedGraph, node: fx.Node) -> None:
    index = cache_index(node)
    assert index is not None
    spec, example = traced.caches[index], value(node)
    part = next(part for part in spec.parts() if node.name == f"{part.name}_{index}")
    leading = example.shape[:1] if isinstance(spec, StateSpec) else example.shape[:2]
    with traced.fake_mode:
        node.meta["example_value"] = example.new_empty((*leading, *part.unit_shape))


def _reduce(traced: TracedGraph, node: fx.Node) -> None:
    with traced.before(node.next, like=node):
        reduced = traced.call(_pagoda.all_reduce.default, node, GROUP)
    node.replace_all_uses_with(reduced, delete_user_cb=lambda user: user is not reduced)


def _gather(traced: TracedGraph, linear: fx.Node) -> None:
    """Let a linear read what all ranks hold, and all ranks read what it yields on each."""
    source: Any = linear.args[0]
    with traced.before(linear):
        gathered = traced.graph.call_function(_pagoda.all_gather.default, (source, traced.ranks, GROUP))
    gathered.meta = {key: found for key, found in linear.meta.items() if key in ("nn_module_stack", "stack_trace")}
    gathered.meta["example_value"] = value(source)
    linear.args = (gathered, *linear.args[1:])
    with traced.before(linear.next, like=linear):
        whole = traced.graph.call_function(_pagoda.all_gather.default, (linear, traced.ranks, GROUP))
    whole.meta = dict(linear.meta)
    linear.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def _count_locally(traced: TracedGraph, node: fx.Node, groups: int) -> None:
    """Let the ids of experts be counted from the first one that this rank holds."""
    call: MoeArguments[Any] = MoeArguments(*node.args)
    count = int(shape(call.up)[0])
    name = f"first_expert_of_{count}_in_{groups}"
    if name not in traced.constants:
        ranks = torch.arange(traced.ranks, device=value(call.topk_ids).device)
        firsts = ranks // (traced.ranks // groups) * count
        _constant(traced, name, firsts, Cut(0, tuple(np.array([rank]) for rank in range(traced.ranks))))
    with traced.before(node):
        ids = traced.call(_pagoda.local_experts.default, call.topk_ids, traced.placeholder(name), count)
    node.args = tuple(call._replace(topk_ids=ids))[: len(node.args)]


def _split_norm(traced: TracedGraph, norm: fx.Node, cut: Cut) -> None:
    """Let a norm over features that ranks share take the sums of all."""
    source, *others = norm.args
    gate, activation, gate_first, size = None, "", False, 0
    if callee(norm) == "gated_rms_norm":
        gate, *others, activation, gate_first, size = others
    features = 1 + max(int(part.max()) for part in cut.indices)
    size = size or features
    group_of = torch.arange(features) // size
    counts = torch.nn.functional.one_hot(group_of).float()
    counted = _constant(traced, f"counts_of_{norm.name}", counts, counted_once(cut))
    groups = _constant(traced, f"groups_of_{norm.name}", group_of, Cut(0, cut.indices))
    weight, *parameters = others
    with traced.before(norm):
        sums = traced.graph.call_function(
            _pagoda.square_sums.default, (source, gate if gate_first else None, counted, activation)
        )
        total = traced.graph.call_function(_pagoda.all_reduce.default, (sums, GROUP))
        args = (source, gate, total, groups, weight, size, *parameters, activation, gate_first)
        normed = traced.graph.call_function(_pagoda.rms_norm_of_sums.default, args)
    for node in (sums, total, normed):
        node.meta = dict(norm.meta)
    norm.replace_all_uses_with(normed)
    traced.graph.erase_node(norm)


def _constant(traced: TracedGraph, name: str, whole: torch.Tensor, cut: Cut) -> fx.Node:
    traced.notes.parts[name] = Part(whole, cut)
    return traced.add_constant(name, part_of(whole, cut, traced.rank))


def _propagate(traced: TracedGraph) -> None:
    """Compute all fake values anew, those of operators with several results among them."""
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        traced.propagate_or_copy(node)


def _fold_heads_late(traced: TracedGraph) -> None:
    """Let what works on each row by itself read heads before they are folded into the tokens, and fold what it
    yields: heads are cut in front of that."""
    for node in list(traced.graph.nodes):
        folds = [n for n in node.all_input_nodes if len(shape(n)) > 1]
        sizes = _unfolded(folds[0]) if folds and callee(node) in _BY_ROWS else None
        if sizes is None or any(_unfolded(fold) != sizes for fold in folds):
            continue
        with traced.before(node):
            heads = {fold: traced.call(_aten.reshape.default, fold.args[0], sizes) for fold in folds}
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: heads.get(n, n))  # noqa: B023
            rows = traced.call(node.target, *args, **kwargs)
            traced.substitute(node, traced.call(_aten.reshape.default, rows, folds[0].args[1]))


def _unfolded(node: fx.Node) -> list[int] | None:
    """The sizes of ``[..., T, H, D]``, -1 for T, of which ``node`` is ``[..., T * H, D]``; None for other nodes."""
    if callee(node) not in RESHAPES:
        return None
    *_, rows, width = shape(node)
    *lead, last = shape(node.args[0])
    sizes = [-1 if is_dynamic(size) else int(size) for size in lead]
    if not is_dynamic(rows) or str(rows) in map(str, lead) or sizes.count(-1) != 1 or last % width:
        return None
    return [*sizes, width] if last == width else [*sizes, last // width, width]


def _join_views(graph: fx.Graph) -> None:
    """One view in place of views of views, so that what one folds and the next unfolds is not in the way."""
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if callee(node) in RESHAPES and callee(source) in RESHAPES:
            node.target = _aten.reshape.default
            node.args = (source.args[0], node.args[1])  # type: ignore[union-attr]
    eliminate_dead_code(graph)


def _join_reductions(traced: TracedGraph) -> None:
    """Add before reducing where two reduced values are added: parallel attention and MLP, shared experts."""
    for node in list(traced.graph.nodes):
        if node.target is not _aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        found = [list(_path_to_reduction(x)) for x in node.args]
        if not all(path and path[-1].target is _pagoda.all_reduce.default for path in found):
            continue
        for path in found:
            reduction = path[-1]
            reduction.replace_all_uses_with(reduction.args[0])  # type: ignore[arg-type]
            traced.graph.erase_node(reduction)
        _reduce(traced, node)


def _path_to_reduction(node: Any) -> Iterator[fx.Node]:
    """From an operand back to the reduction that it is, but for views and factors that all ranks hold."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        yield node
        if callee(node) in RESHAPES:
            node = node.args[0]
        elif callee(node) == "mul.Tensor":
            operands = [x for x in node.args if isinstance(x, fx.Node)]
            reduced = [x for x in operands if _reaches_reduction(x)]
            if len(reduced) != 1:
                return
            node = reduced[0]
        else:
            return


def _reaches_reduction(node: fx.Node) -> bool:
    *_, last = (None, *_path_to_reduction(node))
    return last is not None and last.target is _pagoda.all_reduce.default
