"""Follows, through a flat graph, values made from a router's choices for all tokens of a step.

A mixture of experts sorts and counts what its router chose over the whole step: row numbers, by which the tokens are
put in the order of their experts and back, and sizes and offsets of each expert's rows. Neither changes a token's
result. Anything else would: an expert of limited capacity takes the first so many tokens, whosever they are.
"""

from __future__ import annotations

from enum import IntEnum

from torch import fx

from ..graph.data_movement import CAST_CALLS, REARRANGING_CALLS
from ..graph.fx_nodes import METADATA_CALLS, argument, callee, is_tensor, mutated_arguments, storage_key, value
from ..graph.token_dims import token_dims
from ..graph.traced import TracedGraph
from .dependence import Depends


class Joint(IntEnum):
    """What the choices for several tokens became; a node has the last of its inputs' at least."""

    ORDER = 1  # row numbers that sort, argsort and nonzero yield
    COUNT = 2  # rows per expert, and sums of these
    OTHER = 3


_ORDERS = frozenset("sort argsort nonzero".split())
_COUNTS = frozenset("sum histc bincount count_nonzero scatter_add scatter_add_ index_add index_add_".split())
_SAME = (
    CAST_CALLS | REARRANGING_CALLS | frozenset("long int contiguous clone detach cpu getitem select unbind".split())
)
_KEEPS_ORDER = _SAME | frozenset("sort argsort".split())
_DIVISIONS = frozenset("floordiv floor_divide div remainder mod".split())
_KEEPS_COUNT = _SAME | frozenset(
    "sum cumsum diff cat concat concatenate hstack stack pad add sub add_ sub_ iadd isub setitem copy_ tolist item "
    "narrow".split()
)
_READS_ROWS = frozenset("getitem index index_select gather take_along_dim".split())
_WRITES_ROWS = frozenset(
    "setitem index_put index_put_ index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add "
    "scatter_add_".split()
)
_WRITTEN = ("source", "src", "value", "values")
_TAKES_SIZES = REARRANGING_CALLS | frozenset("split split_with_sizes zeros ones empty new_zeros new_ones".split())
GROUPED_PRODUCTS = frozenset("grouped_mm_fallback _grouped_mm grouped_mm _grouped_linear grouped_linear".split())
"""Products of each expert's rows, told where these end."""


class RouterChoices:
    """What each node of a graph holds of choices for several tokens. Nodes are to be followed in graph order."""

    def __init__(self, traced: TracedGraph, depends: dict[fx.Node, Depends]) -> None:
        self.traced = traced
        self.depends = depends
        self._made: dict[fx.Node, Joint] = {}
        self._written: dict[int, Joint] = {}

    def made(self, node: fx.Node) -> Joint | None:
        """What ``node`` holds by now; None for a number of each token, or none of a router's."""
        key = storage_key(node)
        kinds = [self._made.get(node), None if key is None else self._written.get(key)]
        return max((kind for kind in kinds if kind is not None), default=None)

    def follow(self, node: fx.Node, over_tokens: bool = False) -> str:
        """Note what ``node`` makes of choices; the reason why it lets tokens see each other, or "".

        Args:
            node: the next one.
            over_tokens: it mixes the tokens' choices, or cuts or joins them.
        """
        name = callee(node)
        if name.startswith(("_assert", "_check")):
            return ""
        inputs = list(node.all_input_nodes)
        if name in METADATA_CALLS:
            inputs = [n for n in inputs if n is not node.args[0]]
        joint = {n: kind for n in inputs if (kind := self.made(n)) is not None}
        if joint:
            made = self._made_of(node, name, joint, over_tokens)
        elif over_tokens:
            made = Joint.ORDER if _orders(node) else Joint.COUNT if name in _COUNTS else Joint.OTHER
        else:
            return ""
        if made is None:
            return ""
        if self.depends[node] is Depends.TOKENS or node.op == "output":
            return f"{name} reads values made from the choices or comparisons of all tokens of the step"
        self._made[node] = max(made, self._made.get(node, made))
        for target in mutated_arguments(node):
            if (key := storage_key(target)) is not None:
                self._written[key] = max(made, self._written.get(key, made))
            else:
                self._made[target] = max(made, self._made.get(target, made))
        return ""

    def _made_of(self, node: fx.Node, name: str, joint: dict[fx.Node, Joint], over_tokens: bool) -> Joint | None:
        kinds = set(joint.values())
        first = node.args[0] if node.args else None
        if name == "getitem" and callee(first) == "sort" and node.args[1] == 0:
            return self.made(argument(first, 0, "input"))  # the tokens' choices in another order
        if kinds == {Joint.ORDER}:
            if name in _READS_ROWS and first not in joint:
                return self._rows_read(first)
            if name in _WRITES_ROWS and first not in joint:
                return self._rows_written(node, first, joint)
            divided = name in _DIVISIONS and len(node.all_input_nodes) == 1
            if divided or (name in _KEEPS_ORDER and (not over_tokens or _orders(node))):
                return Joint.ORDER
        if kinds == {Joint.COUNT} and not over_tokens:
            if name in GROUPED_PRODUCTS or (name in _TAKES_SIZES and not any(map(is_tensor, joint))):
                return None
            others = [n for n in node.all_input_nodes if n not in joint]
            if name in _KEEPS_COUNT and all(self.depends[n] is Depends.CONSTANT for n in others):
                return Joint.COUNT
        return Joint.OTHER

    def _rows_read(self, source: fx.Node) -> Joint | None:
        if not token_dims(self.traced, source):
            return Joint.OTHER
        numbers = self.depends[source] is Depends.CONSTANT and not value(source).dtype.is_floating_point
        return Joint.ORDER if numbers else None

    def _rows_written(self, node: fx.Node, target: fx.Node, joint: dict[fx.Node, Joint]) -> Joint | None:
        rest = node.args[2 if callee(node) in ("setitem", "index_put", "index_put_") else 3 :]
        written = next((n for n in (*rest, *map(node.kwargs.get, _WRITTEN)) if n is not None), None)
        if written in joint or not token_dims(self.traced, target):
            return Joint.OTHER
        numbers = isinstance(written, fx.Node) and self.depends[written] is Depends.CONSTANT
        return Joint.ORDER if numbers else None


def _orders(node: fx.Node) -> bool:
    return callee(node) in _ORDERS or is_where_true(node)


def is_where_true(node: fx.Node) -> bool:
    """Tell whether it yields where a condition holds, and chooses between nothing."""
    return callee(node) == "where" and len(node.args) + len(node.kwargs) == 1
