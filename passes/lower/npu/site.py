"""One operator that is being lowered: routes are tried against the limits, and what was refused is kept."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ....runtime.ops import npu  # noqa: F401  registers the operators
from ....runtime.ops.npu.limits import violations
from ...graph.fx_nodes import eliminate_dead_code, module_path, value
from ...graph.provenance import operator_name
from ...graph.record import PassRecord, Route
from ...graph.traced import TracedGraph
from .call import Call
from .sink_transposes import transposes_heads

_aten = torch.ops.aten


class Site:
    """A node in front of which its replacement is inserted.

    Args:
        traced: the graph; it has an NPU target.
        node: what is lowered.
        record: gets the chosen route.

    Attributes:
        args: of the node.
        refused: routes that the limits did not let through, with the reasons.
    """

    def __init__(self, traced: TracedGraph, node: fx.Node, record: PassRecord) -> None:
        assert traced.npu is not None
        self.traced, self.node, self.record, self.target = traced, node, record, traced.npu
        self.args: tuple[Any, ...] = node.args
        self.refused: list[tuple[str, str]] = list(node.meta.get("refused", ()))  # by a pass that left it to this one
        self._chosen: list[str] = []

    def call(self, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> fx.Node | None:
        """Insert a call of an ``npu::`` operator if it is legal; else None, and the reason is noted."""
        call = Call.make(overload, self.target, *args, **kwargs)
        reasons = violations(call)
        if reasons:
            self.refuse(f"npu.{call.name}", "; ".join(reasons))
            return None
        self._chosen.append(f"npu.{call.name}")
        return self.traced.call(overload, *args, **kwargs)

    def refuse(self, route: str, reason: str) -> None:
        """Note why a better route is not taken."""
        if (route, reason) not in self.refused:
            self.refused.append((route, reason))

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """One result of a node that has several."""
        return self.traced.call(operator.getitem, node, index)

    def aten(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of an ATen operator."""
        node = self.traced.call(target, *args, **kwargs)
        self._chosen.append(operator_name(node))
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` in another dtype; itself if that is its own."""
        return node if value(node).dtype is dtype else self.aten(_aten._to_copy.default, node, dtype=dtype)

    def replace(self, new: fx.Node | Sequence[fx.Node]) -> None:
        """Replace the node, or its results one by one, with ``new``, and keep the chosen operators."""
        if isinstance(new, fx.Node):
            self.traced.substitute(self.node, new)
        else:
            for user in list(self.node.users):
                self.traced.substitute(user, new[user.args[1]])
            self.traced.graph.erase_node(self.node)
        self.done()

    def done(self) -> None:
        """Keep what was chosen for a node that was replaced."""
        self.record.matches += 1
        self.keep()

    def retry(self) -> None:
        """Note that what was inserted so far is not chosen: another route is tried."""
        self._chosen.clear()

    def leave(self) -> None:
        """Note that the node stays; what was inserted for it is not chosen."""
        self._chosen.clear()
        self.keep()

    def keep(self) -> None:
        """Note what was chosen, or that nothing was."""
        self.record.routes.append(
            Route(
                self.node.name,
                module_path(self.node),
                operator_name(self.node),
                tuple(dict.fromkeys(self._chosen)),
                tuple(self.refused),
            )
        )

    def inline(self, function: Callable[..., Any], *args: Any) -> Any:
        """Insert the ATen operators that ``function`` calls; nodes stand for its tensors. Nodes that it returns.

        Raises:
            ValueError: the function writes into a tensor of its own: passes take nodes for what they yield. Or it
                takes a size that varies for the number that it was in the example.
        """
        nodes = inline(self.traced, function, *args)
        self._chosen.append("aten")
        return nodes

    def dense(self, node: fx.Node) -> fx.Node:
        """The same tensor without gaps, where kernels read it by its sizes."""
        if self.target.graph_mode == "ge" or value(node).is_contiguous():
            return node
        return self.aten(_aten.clone.default, node, memory_format=torch.contiguous_format)

    def tokens_first(self, node: fx.Node) -> fx.Node:
        """``[B, H, T, D]`` as ``[B, T, H, D]``; without a node where it came from there."""
        if transposes_heads(node):
            before: fx.Node = node.args[0]
            return before
        return self.traced.call(_aten.transpose.int, node, 1, 2)

    def replace_heads_first(self, old: fx.Node, new: fx.Node) -> None:
        """Replace ``old``, ``[B, H, T, D]``, with ``new``, ``[B, T, H, D]``.

        Users that transpose ``old`` read ``new`` as it is.
        """
        for user in list(old.users):
            if transposes_heads(user):
                self.traced.substitute(user, new)
        if old.users:
            with self.traced.before(self.node):
                transposed = self.traced.call(_aten.transpose.int, new, 1, 2)
            self.traced.substitute(old, transposed)
        else:
            self.traced.graph.erase_node(old)


Lowering = Callable[..., "fx.Node | Sequence[fx.Node] | None"]
"""Makes what stands for a node, one node or one for each of its results, of a site and the node's arguments; None if
it has put that in the node's place itself."""


def lower_each(traced: TracedGraph, name: str, lowerings: Mapping[Any, Lowering]) -> PassRecord:
    """Lower every node whose operator has a lowering; what pass ``name`` did."""
    record = PassRecord(name)
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or node.target not in lowerings:
            continue
        site = Site(traced, node, record)
        with traced.before(node):
            new = lowerings[node.target](site, *site.args)
        if new is None:
            site.done()
        else:
            site.replace(new)
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record


def inline(traced: TracedGraph, function: Callable[..., Any], *args: Any) -> Any:
    """As ``Site.inline``, at the graph's insertion point."""
    return _Inliner(traced).run(function, args)


class _Inliner(TorchDispatchMode):
    """Records the ATen calls that a function makes on fake tensors as nodes at a graph's insertion point."""

    def __init__(self, traced: TracedGraph) -> None:
        super().__init__()
        self.traced = traced
        self.nodes: dict[int, fx.Node] = {}
        self.kept: list[torch.Tensor] = []  # so that no id is used twice
        self.given: set[int] = set()  # ids of the arguments

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        def enter(given: Any) -> Any:
            found = value(given)
            if isinstance(found, torch.Tensor):
                # A view of its own: one tensor may be what several nodes stand for.
                self.nodes[id(found)] = given
                self.kept.append(found)
            return found

        given = pytree.tree_map(enter, args, is_leaf=lambda x: isinstance(x, fx.Node))
        self.given = set(self.nodes)
        shapes = self.traced.fake_mode.shape_env
        fixed = set(shapes.replacements) if shapes is not None else set()
        # Composite operators in torch's own Python: those in C++ (matmul of torch 2.12) ask for sizes as numbers.
        with enable_python_dispatcher(), self.traced.fake_mode, torch.no_grad(), self:
            result = function(*given)
        if shapes is not None:
            new = {size: to for size, to in shapes.replacements.items() if size not in fixed and to.is_number}
            if new:
                raise ValueError(f"the function takes sizes that vary for numbers: {new}; it must keep them symbolic")
        return pytree.tree_map(lambda t: self.nodes[id(t)] if isinstance(t, torch.Tensor) else t, result)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and id(args[0]) not in self.given:
            raise ValueError(f"{func} writes into a tensor that the function made; make it of its parts")
        result = func(*args, **kwargs)
        nodes_in = pytree.tree_map(self._node, (args, kwargs))
        node = self.traced.graph.call_function(func, nodes_in[0], nodes_in[1])
        self.traced.adopt(node, result)
        if isinstance(result, torch.Tensor):
            self._keep(result, node)
        elif isinstance(result, list | tuple):
            for i, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    self._keep(part, self._inserted(operator.getitem, (node, i), part))
        return result

    def _keep(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.kept.append(tensor)

    def _node(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if id(x) not in self.nodes:
                raise ValueError(f"a tensor of shape {tuple(x.shape)} comes from outside the function")
            return self.nodes[id(x)]
        if isinstance(x, torch.SymInt) and not x.node.expr.is_number:
            return self._size(x)
        return int(x) if isinstance(x, torch.SymInt) else x

    def _size(self, size: torch.SymInt) -> fx.Node:
        """A node that yields ``size``: read off a tensor that is there already, or computed from such."""
        for tensor in self.kept:  # the arguments first, so that all layers read it off the same ones
            for dim, found in enumerate(tensor.shape):
                if isinstance(found, torch.SymInt) and found.node.expr == size.node.expr:
                    return self._inserted(_aten.sym_size.int, (self.nodes[id(tensor)], dim), size)
        expression, shapes = size.node.expr, size.node.shape_env
        target = operator.mul if expression.is_Mul else operator.add if expression.is_Add else None
        if target is None:
            raise ValueError(f"no tensor has the size {size}")
        parts = [int(e) if e.is_number else shapes.create_symintnode(e, hint=None) for e in expression.args]
        nodes = [part if isinstance(part, int) else self._size(part) for part in parts]
        whole: Any = functools.reduce(lambda a, b: self._inserted(target, (a, b), target(value(a), value(b))), nodes)
        return whole

    def _inserted(self, target: Any, args: tuple[Any, ...], example: Any) -> fx.Node:
        node = self.traced.graph.call_function(target, args)
        self.traced.adopt(node, example)
        return node
