"""The walk from a linear layer that reads cut inputs back to those that make them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from ...runtime.program import CacheSpec, StateSpec
from ..graph.cut import Cut, Indices, Refused, deal, first_only, in_order
from ..graph.fx_nodes import cache_index, callee, shape, value
from ..graph.traced import TracedGraph
from .slices import check_part

_aten = torch.ops.aten

Rule = Callable[["Walk", fx.Node, Cut], None]
"""Demands cuts of the operands of a node whose result is cut, or raises ``Refused``."""
ItemsRule = Callable[["Walk", fx.Node, dict[int, Cut]], None]
"""The same of a node with several results, by their number."""

SHARDED = "sharded"
"""Key in the meta of nodes of which every rank computes a part."""
_READS_SIZES = frozenset({"sym_size.int", "new_empty"})


class Walk:
    """One region of a graph: all that has to be cut for a closing linear to read a part of its inputs.

    Attributes:
        cuts: of every node of the region with one result, graph inputs among them.
        closers: linears that read a cut value whole: what they yield has to be summed over the ranks.
        gathers: the closers read all inputs, gathered from the ranks, and yield a part of the outputs, gathered, too.
        specs: cache → what a rank stores of it.
        sums: norms over features that the ranks share, and who holds which.
        opened: a linear's outputs are cut.
        holds: attention or a state is inside.
        expert_groups: groups of ranks that hold different experts, of a region of routed experts.
        works: something other than views is computed between.
    """

    def __init__(
        self,
        traced: TracedGraph,
        ranks: int,
        rules: dict[str, Rule],
        items: dict[str, ItemsRule],
        *,
        gathers: bool = False,
    ) -> None:
        self.traced, self.ranks, self.gathers = traced, ranks, gathers
        self.cuts: dict[fx.Node, Cut] = {}
        self.users: dict[fx.Node, set[fx.Node]] = {}
        self.closers: list[fx.Node] = []
        self.specs: dict[int, CacheSpec | StateSpec] = {}
        self.sums: list[tuple[fx.Node, Cut]] = []
        self.opened = self.works = self.holds = False
        self.expert_groups = 1
        self._rules, self._items = rules, items
        self._order = {node: i for i, node in enumerate(traced.graph.nodes)}
        self._wanted: dict[fx.Node, list[tuple[fx.Node, Cut]]] = {}
        self._targets: dict[fx.Node, Callable[..., Any]] = {}
        self._edits: list[Callable[[], tuple[fx.Node, tuple[Any, ...]]]] = []

    def demand(self, node: Any, user: fx.Node, dim: int, indices: Indices, further: Cut | None = None) -> None:
        """Let ``user`` read ``node`` cut so; what is no node is a number, and the same on every rank."""
        if isinstance(node, fx.Node):
            cut = Cut(dim % max(1, len(shape(node))), indices, further)
            self._wanted.setdefault(node, []).append((user, cut))

    def close(self, linear: fx.Node, indices: Indices) -> None:
        """Let a linear read a part of its inputs on every rank."""
        source, weight, *bias = linear.args
        self.closers.append(linear)
        if self.gathers:
            outputs = deal(int(shape(weight)[0]), 1, self.ranks)
            if not in_order(indices, int(shape(source)[-1])) or not in_order(outputs, int(shape(weight)[0])):
                raise Refused("inputs or outputs that ranks gather are not held in equal runs")
            for parameter in (weight, *bias):
                self.demand(parameter, linear, 0, outputs)
            return
        self.demand(weight, linear, 1, indices)
        if bias and bias[0] is not None:
            self.demand(bias[0], linear, 0, first_only(int(shape(bias[0])[0]), self.ranks))

    def edit(self, make: Callable[[], tuple[fx.Node, tuple[Any, ...]]]) -> None:
        """Change the arguments of a node once all cuts are known; ``make`` may raise ``Refused``."""
        self._edits.append(make)

    def retarget(self, node: fx.Node, target: Callable[..., Any]) -> None:
        """Let a node call another operator when the region is applied."""
        self._targets[node] = target

    def run(self, linear: fx.Node, indices: Indices) -> Walk:
        """Walk back from a closing linear.

        Raises:
            Refused: something between has no rule, or is read as a whole by something else.
        """
        self.close(linear, indices)
        self.demand(linear.args[0], linear, -1, indices)
        self.finish()
        return self

    def finish(self) -> None:
        """Follow all demands to their end.

        Raises:
            Refused: as ``run``.
        """
        while self._wanted:
            node = max(self._wanted, key=self._order.__getitem__)
            self._visit(node, self._wanted.pop(node))
        if not self.opened:
            raise Refused("nothing opens it: no linear makes what it reads")
        if not self.works:
            raise Refused("nothing is computed between it and the linears before")
        for linear in self.closers:
            if linear in self.cuts:
                raise Refused(f"{linear.name} is to be cut along both dims")
        self._settled = [make() for make in self._edits]

    def apply(self) -> None:
        """Change what the region's nodes say of sizes."""
        for node, args in self._settled:
            node.args = args
            node.target = self._targets.get(node, node.target)
        for node in self.cuts:
            node.meta[SHARDED] = True
        for index, spec in self.specs.items():
            self.traced.caches[index] = spec

    def _visit(self, node: fx.Node, demands: list[tuple[fx.Node, Cut]]) -> None:
        users = {user for user, _ in demands}
        self.users[node] = users
        items = isinstance(value(node), (list, tuple))
        cut = None if items else _joined(node, demands, self.ranks)
        if node.op != "placeholder":
            if cut is not None and cut.further is not None:
                raise Refused(f"what {callee(node)} yields is cut along two dims")
            self._check_readers(node, users, cut)
        name = callee(node)
        if node.op == "placeholder":
            self._check_input(node, cut)
        elif items:
            rule = self._items.get(name)
            if rule is None:
                raise Refused(f"no rule for results of {name}")
            rule(self, node, {user.args[1]: cut for user, cut in demands})  # type: ignore[misc]
        elif node.target is operator.getitem:
            self.demand_item(node, cut)  # type: ignore[arg-type]
        elif name not in self._rules:
            raise Refused(f"no rule for {name}")
        else:
            self._rules[name](self, node, cut)  # type: ignore[arg-type]
        if cut is not None:
            self.cuts[node] = cut

    def demand_item(self, node: fx.Node, cut: Cut) -> None:
        source: Any = node.args[0]
        self._wanted.setdefault(source, []).append((node, cut))

    def _check_readers(self, node: fx.Node, users: set[fx.Node], cut: Cut | None) -> None:
        for user in node.users:
            if user in users or callee(user) in _READS_SIZES:
                continue
            closes = user.target is _aten.linear.default and user.args[0] is node
            if closes and cut is not None and cut.dim == len(shape(node)) - 1:
                self.close(user, cut.indices)
                continue
            raise Refused(f"{callee(user)} reads {callee(node)} as a whole")

    def _check_input(self, node: fx.Node, cut: Cut | None) -> None:
        assert cut is not None
        if node.name in self.traced.constants:
            check_part(self.traced.constants[node.name], cut)
        elif cache_index(node) is None:
            raise Refused(f"it is cut along {node.name}, which comes with the step")

    def hold(self, cache: fx.Node, **parts: Any) -> None:
        """Let a rank store a part of a cache."""
        index = cache_index(cache)
        assert index is not None
        self.specs[index] = replace(self.traced.caches[index], **parts)


def _joined(node: fx.Node, demands: list[tuple[fx.Node, Cut]], ranks: int) -> Cut:
    """The cut that serves all readers: the same, or pieces beside each other.

    Raises:
        Refused: readers want different ones.
    """
    cuts = list(dict.fromkeys(cut for _, cut in demands))
    if len(cuts) == 1:
        return cuts[0]
    if len({cut.dim for cut in cuts}) != 1 or any(cut.further for cut in cuts):
        raise Refused(f"{callee(node)} is cut along two dims")
    pieces = sorted(cuts, key=lambda cut: min(int(part[part >= 0].min(initial=1 << 60)) for part in cut.indices))
    held = [np.concatenate([cut.indices[r] for cut in pieces]) for r in range(ranks)]
    for part in held:
        given = part[part >= 0]
        if len(set(given.tolist())) != len(given):
            raise Refused(f"readers of {callee(node)} want different parts of it")
    return Cut(pieces[0].dim, tuple(held))
