"""Runs a part of a traced graph with real values, at a chosen number of tokens.

Masks and head layouts are not guessed from how they are spelled: they are run on a few tokens and looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .fx_nodes import METADATA_CALLS, callee, closure, mutated_arguments, storage_key, value
from .traced import TracedGraph

if TYPE_CHECKING:
    import sympy


MOST_BYTES = 1 << 30
"""Limit on the values that an evaluation holds at once, without stored tensors."""


class DependsOnData(Exception):
    """The value asked for depends on what the tokens are, not only on where they stand."""


class TooLarge(RuntimeError):
    """Computing the requested value would take too much memory."""


def at_sizes(item: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """Replace every symbolic size in ``item`` (nested in tuples, lists, slices) by its number."""

    def one(x: Any) -> Any:
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expr = x.node.expr.subs(dict(sizes))
            if isinstance(x, torch.SymBool):
                return bool(expr)
            return int(expr) if isinstance(x, torch.SymInt) else float(expr)
        return x

    return pytree.tree_map(one, item)


def small_sizes(node: fx.Node, first: int = 5) -> dict[sympy.Symbol, int]:
    """Distinct small numbers for every free symbol in the sizes of ``node``'s tensor."""
    symbols: set[sympy.Symbol] = set()
    v = value(node)
    if isinstance(v, torch.Tensor):
        for s in (*v.shape, *v.stride(), v.storage_offset()):
            if isinstance(s, torch.SymInt):
                symbols |= s.node.expr.free_symbols
    return {s: first + 2 * i for i, s in enumerate(sorted(symbols, key=str))}


class Evaluation:
    """Evaluates nodes of ``traced`` with sizes fixed and some nodes' values given.

    Args:
        traced: the graph.
        sizes: number for each symbol.
        given: values of nodes, taken instead of computing them.
        substitute: number → integer used in place of literals that equal it, everywhere in the evaluated part.
    """

    def __init__(
        self,
        traced: TracedGraph,
        sizes: Mapping[sympy.Symbol, int],
        given: Mapping[fx.Node, Any] | None = None,
        substitute: Mapping[float, int] | None = None,
    ) -> None:
        self.traced = traced
        self.sizes = sizes
        self.given = dict(given or {})
        self.substitute = dict(substitute or {})

    def __call__(self, node: fx.Node) -> Any:
        """The value of ``node``.

        Raises:
            DependsOnData: the node reads token ids or any input that is neither constant nor a position.
            TooLarge: more than ``MOST_BYTES`` would be held at once.
        """
        env: dict[fx.Node, Any] = dict(self.given)
        needed = self.needed(node)
        written = {storage_key(target) for n in needed for target in mutated_arguments(n)}
        spent = _read_last(needed)
        held = 0
        for n in needed:
            if n not in env:
                held += self._bytes(n)
                if held > MOST_BYTES:
                    sizes = tuple(at_sizes(tuple(value(n).shape), self.sizes))
                    raise TooLarge(
                        f"{n.name} {sizes} takes it above {MOST_BYTES / 2**30:.2g} GiB; "
                        "lower max_position_embeddings in config.json if it grows with that"
                    )
                env[n] = self._run(n, env)
                if n.op == "placeholder" and storage_key(n) in written:
                    env[n] = env[n].clone()
            for source in spent.get(n, ()):
                if source is not node and source not in self.given:
                    del env[source]
                    held -= self._bytes(source)
        return env[node]

    def needed(self, node: fx.Node) -> list[fx.Node]:
        """Everything whose elements ``node`` is computed from, itself included, in graph order.

        Raises:
            DependsOnData: an input is among it that is neither constant nor a position.
        """
        found = closure(node, self.reads)
        known = {self.traced.position_ids, *self.traced.constants}
        for n in found:
            if n.op == "placeholder" and n not in self.given and not is_size(n) and n.name not in known:
                raise DependsOnData(n.name)
        return found

    def reads(self, user: fx.Node, node: fx.Node) -> bool:
        """Tell whether ``user`` needs the elements of ``node``, not only its shape (see ``closure``)."""
        if user in self.given or is_size(user):
            return False
        return not (callee(user) in METADATA_CALLS and user.args and user.args[0] is node)

    def sources(self, node: fx.Node) -> list[str]:
        """Names of the constants whose elements ``node`` is computed from."""
        return [n.name for n in closure(node, self.reads) if n.name in self.traced.constants]

    def _run(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if is_size(node):
            return at_sizes(value(node), self.sizes)
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            return getattr(self.traced.module, str(node.target))

        def lookup(n: fx.Node) -> Any:
            if n in env:
                return env[n]
            v = value(n)
            if isinstance(v, torch.Tensor):
                return torch.zeros((), dtype=v.dtype).expand(at_sizes(tuple(v.shape), self.sizes))
            return at_sizes(v, self.sizes)

        args, kwargs = fx.map_arg((node.args, node.kwargs), lookup)
        if self.substitute:
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._swap)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        return target(*args, **kwargs)

    def _swap(self, x: Any) -> Any:
        return type(x)(self.substitute.get(x, x)) if type(x) in (int, float) else x

    def _input(self, node: fx.Node) -> Any:
        if node.name in self.traced.constants:
            return self.traced.constants[node.name]
        shape = at_sizes(tuple(value(node).shape), self.sizes)
        return torch.arange(shape[-1]).expand(shape).contiguous()

    def _bytes(self, node: fx.Node) -> int:
        """What a result takes that is neither a stored tensor nor a view of another."""
        v, key = value(node), storage_key(node)
        if not node.op.startswith("call_") or not isinstance(v, torch.Tensor):
            return 0
        if any(storage_key(n) == key for n in node.all_input_nodes):
            return 0
        return math.prod(at_sizes(tuple(v.shape), self.sizes)) * v.element_size()


def _read_last(needed: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node those of ``needed`` whose memory none behind it reads."""
    last: dict[int | fx.Node, fx.Node] = {}
    for node in needed:
        for n in (node, *node.all_input_nodes):
            last[storage_key(n) or n] = node
    spent: dict[fx.Node, list[fx.Node]] = {}
    for node in needed:
        spent.setdefault(last[storage_key(node) or node], []).append(node)
    return spent


def is_size(node: fx.Node) -> bool:
    """True for a node that yields numbers known from the shapes of the inputs alone."""
    v = value(node)
    return v is not None and not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(v))
