"""A copy of a lowered graph in which every size is a number, for the graph engine.

Matches:
    a lowered graph whose sizes are symbols and whose attention takes lengths as lists of integers
Becomes:
    the same operators over tensors of given sizes. Symbols are replaced in every argument and in every recorded
    value; integers that are computed from them are folded; each list of lengths is an int64 tensor on the device,
    which attention takes by torchair's own form of the operator
Why it is faster:
    the graph engine schedules a graph with sizes that it does not know from the host, operator by operator; one whose
    sizes and tilings it knows is launched as a whole.

A symbol that keeps the hint that it was traced with would be a wrong constant: after the copy every operator's fake
kernel runs once more, and what it yields must have the sizes that the recorded value has with the symbols replaced.
"""

from __future__ import annotations

import copy
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.fx.node import map_aggregate

from .....passes import TracedGraph
from .....passes.graph.fx_nodes import value
from .....runtime.device_queue import sent
from .....runtime.program import is_cache_input
from ....report import first_line
from ..flat_graph import LENGTHS_ON_DEVICE, is_constant, list_inputs, readers

_npu, _aten = torch.ops.npu, torch.ops.aten
LENGTHS = {
    _npu.npu_fused_infer_attention_score.default: ("actual_seq_lengths", "actual_seq_lengths_kv"),
    _npu.npu_fused_infer_attention_score_v2.default: ("actual_seq_qlen", "actual_seq_kvlen"),
}
"""Operators of which torchair has a form that takes lengths as tensors, and the arguments that they are."""

_IN_BLOCKS = (*LENGTHS, *LENGTHS_ON_DEVICE, _npu.npu_incre_flash_attention.default)
"""Operators that read caches where they lie."""

_SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool
_SIZED = torch.Tensor | _SYMBOLIC

_SCATTERED = frozenset({_aten.slice_scatter.default, _aten.select_scatter.default, _aten.scatter.value})
"""Operators for which torchair asks for the sizes of their inputs, even where it knows them."""

Attention = Mapping[Any, Callable[..., Any]]
"""Operator of ``LENGTHS`` → its form with tensors of lengths."""


class NotStatic(ValueError):
    """A graph that cannot be given sizes. The message says which part and why."""


@dataclass(frozen=True)
class StaticGraph:
    """A copy of a traced graph's module whose sizes are numbers, and what to trace it with.

    Attributes:
        module: the copy.
        values: one fake tensor per placeholder of the copy, without symbols.
        fake_mode: of these.
        fixed: positions, among these, of tensors that keep their addresses: weights, and the caches as bound.
        used: positions of the placeholders of the traced graph that the copy has too.
        lists: positions of its lists.
        device: that runs it.
    """

    module: fx.GraphModule
    values: list[torch.Tensor]
    fake_mode: FakeTensorMode
    fixed: frozenset[int]
    used: tuple[int, ...]
    lists: tuple[int, ...]
    device: torch.device

    def flatten(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """The copy's inputs for the traced graph's, lists as tensors on the device."""
        return [
            sent(torch.tensor(inputs[i], dtype=torch.int64), self.device) if i in self.lists else inputs[i]
            for i in self.used
        ]


def air_attention() -> Attention:
    """Torchair's forms of attention with tensors of lengths, each of which it defines when it is first used."""
    forms = {}
    for target in LENGTHS:
        name = target._schema.name.partition("::")[2]
        importlib.import_module(f"torchair.ops._{name}")
        forms[target] = getattr(torch.ops.air, name).default
    return forms


def why_not_static(traced: TracedGraph) -> str:
    """The reason why a lowered graph has no static form, or one that would not pay; "" where there is none."""
    if not traced.paged:
        return "the caller sets the sizes of a call that is not paged"
    for node in traced.placeholders:
        if node.name == "block_table" and not all(r.target in _IN_BLOCKS for r in readers(node)):
            return "the graph gathers cache blocks for the longest possible sequence"
        for user in node.users if isinstance(value(node), list) else ():
            if not _takes_tensor(user, node):
                return f"{user.name} ({user.target}) takes lengths from the host"
    for node in traced.graph.nodes:
        if any(free_unbacked_symbols(part) for part in _parts(value(node)) if isinstance(part, _SIZED)):
            return f"the size of {node.name} ({node.target}) depends on values"
    return ""


def static_graph(traced: TracedGraph, inputs: Mapping[str, torch.Tensor], attention: Attention) -> StaticGraph:
    """Copy the module of ``traced`` with the sizes of ``inputs``.

    Args:
        traced: a lowered graph; it is not changed.
        inputs: placeholder → a tensor of its size, for each cache and each input of a step but lists. Only sizes
            count.
        attention: replaces the operators that take lists of lengths.

    Raises:
        NotStatic: a size is not determined by those of ``inputs``, or contradicts them; a list is read otherwise
            than by attention.
    """
    copier = _Copier(traced, _Sizes(_known_sizes(traced, inputs)), attention, inputs)
    for node in traced.graph.nodes:
        copier.copy(node)
    copier.graph.lint()
    places = {node: i for i, node in enumerate(traced.placeholders)}
    keeps = (is_cache_input(node.name) or is_constant(traced, node.name) for node in copier.inputs)
    return StaticGraph(
        module=fx.GraphModule(traced.module, copier.graph),
        values=list(copier.inputs.values()),
        fake_mode=copier.fake_mode,
        fixed=frozenset(at for at, kept in enumerate(keeps) if kept),
        used=tuple(places[node] for node in copier.inputs),
        lists=list_inputs(traced),
        device=value(traced.placeholder(traced.input_ids)).device,
    )


class _Sizes:
    """Numbers in place of symbols.

    Args:
        known: the number of each symbol.
    """

    def __init__(self, known: Mapping[sympy.Symbol, sympy.Integer]) -> None:
        self._known = known

    def number(self, size: Any) -> Any:
        """A size, or what is computed from sizes, as a number; anything else as it is.

        Raises:
            NotStatic: it has a symbol whose number is not known.
        """
        if not isinstance(size, _SYMBOLIC):
            return size
        expression = size.node.expr.xreplace(self._known)
        if expression.free_symbols:
            raise NotStatic(f"no input determines {size}")
        if isinstance(size, torch.SymBool):
            return bool(expression)
        return int(expression) if isinstance(size, torch.SymInt) else float(expression)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The sizes of a tensor."""
        return tuple(self.number(size) for size in tensor.shape)


class _Copier:
    """A copy of a traced graph in the making, node by node in its order.

    Args:
        traced: the graph.
        sizes: its sizes.
        attention, inputs: as for ``static_graph``.

    Attributes:
        graph: the copy.
        fake_mode: of its values.
        inputs: placeholder of the traced graph that the copy has → its value there.
    """

    def __init__(
        self, traced: TracedGraph, sizes: _Sizes, attention: Attention, inputs: Mapping[str, torch.Tensor]
    ) -> None:
        self.graph = fx.Graph()
        self.fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.inputs: dict[fx.Node, torch.Tensor] = {}
        self._traced, self._sizes, self._attention, self._given = traced, sizes, attention, inputs
        self._sequences = inputs["block_table"].shape[0] if "block_table" in inputs else 0  # of lists
        self._device = value(traced.placeholder(traced.input_ids)).device
        self._copies: dict[fx.Node, Any] = {}
        self._values: dict[fx.Node, Any] = {}

    def copy(self, node: fx.Node) -> None:
        """Copy the next node; fold it where it is a number, leave it out where it is an input that nothing reads.

        Raises:
            NotStatic: see ``static_graph``.
        """
        if node.op == "placeholder" and not node.users:
            return
        try:
            if isinstance(value(node), _SYMBOLIC):
                self._copies[node] = self._sizes.number(value(node))
            elif node.op == "placeholder":
                self._copy_input(node)
            else:
                self._copy_call(node)
        except NotStatic as error:
            raise NotStatic(f"{node.name} ({node.target}): {error}") from None

    def _copy_input(self, node: fx.Node) -> None:
        recorded = value(node)
        with self.fake_mode:
            if isinstance(recorded, list):
                made = torch.empty(self._sequences, dtype=torch.int64, device=self._device)
            else:
                strides = [self._sizes.number(stride) for stride in recorded.stride()]
                shape, device = self._sizes.shape(recorded), recorded.device
                made = torch.empty_strided(shape, strides, dtype=recorded.dtype, device=device)
        if node.name in self._given and self._given[node.name].shape != made.shape:
            raise NotStatic(f"its shape is {tuple(made.shape)}, but {tuple(self._given[node.name].shape)} was given")
        self._note(node, self.graph.placeholder(node.name), made)
        self.inputs[node] = made

    def _copy_call(self, node: fx.Node) -> None:
        target = node.target
        lists = [
            given for given in node.all_input_nodes if given.op == "placeholder" and isinstance(value(given), list)
        ]
        if lists:
            if not all(_takes_tensor(node, given) for given in lists):
                raise NotStatic("it takes lengths from the host")
            target = self._attention[target]
        args, kwargs = self._mapped(node.args), self._mapped(node.kwargs)
        if target in _SCATTERED:
            target, args, kwargs = _aten.scatter.src, self._scattered(node, *args, **kwargs), {}
        made = self.graph.create_node(node.op, target, args, kwargs, node.name, node.type)
        if node.op == "output":
            made.meta = copy.copy(node.meta)
        else:
            self._note(node, made, self._computed(made))

    def _scattered(self, node: fx.Node, base: fx.Node, src: Any, dim: Any = 0, *where: Any, **named: Any) -> Any:
        """Arguments of ``aten.scatter`` for a call of ``_SCATTERED``: known places and numbers are constants."""
        if node.target is _aten.scatter.value:
            (index, number), dtype = (dim, *where, *named.values()), self._values[base].dtype
            filled = self._made(
                _aten.full.default, list(self._values[index].shape), number, dtype=dtype, device=self._device
            )
            return base, src, index, filled
        shape = list(self._values[base].shape)
        if node.target is _aten.select_scatter.default:
            (index,) = (*where, *named.values())
            src, places = (
                self._made(_aten.unsqueeze.default, src, dim),
                (index % shape[dim], index % shape[dim] + 1, 1),
            )
        else:
            bounds = {
                "start": None,
                "end": None,
                "step": 1,
                **dict(zip(("start", "end", "step"), where, strict=False)),
            }
            given = slice(*{**bounds, **named}.values())
            places = given.indices(shape[dim])
        along = self._made(_aten.arange.start_step, *places, device=self._device)
        view = [-1 if i == dim % len(shape) else 1 for i in range(len(shape))]
        index = self._made(_aten.view.default, along, view)
        wide = self._made(_aten.expand.default, index, list(self._values[src].shape))
        return base, dim, wide, src

    def _made(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the copy that the traced graph has none of."""
        made = self.graph.call_function(target, args, kwargs)
        self._values[made] = made.meta["example_value"] = self._computed(made)
        return made

    def _note(self, node: fx.Node, made: fx.Node, computed: Any) -> None:
        """Record a copy and what it yields, which has the recorded sizes.

        Raises:
            NotStatic: it has others.
        """
        for recorded, found in zip(_parts(value(node)), _parts(computed), strict=False):
            if not isinstance(recorded, torch.Tensor) or not isinstance(found, torch.Tensor):
                continue
            expected = self._sizes.shape(recorded)
            if (expected, recorded.dtype) != (tuple(found.shape), found.dtype):
                raise NotStatic(
                    f"it returns {found.dtype} {tuple(found.shape)}, but {recorded.dtype} {expected} was recorded"
                )
        made.meta = {**node.meta, "example_value": computed}
        if "val" in made.meta:
            made.meta["val"] = computed
        self._copies[node], self._values[made] = made, computed

    def _mapped(self, arguments: Any) -> Any:
        """Arguments of a node as its copy has them."""
        return map_aggregate(
            arguments, lambda part: self._copies[part] if isinstance(part, fx.Node) else self._sizes.number(part)
        )

    def _computed(self, made: fx.Node) -> Any:
        """What the copy of a node yields, by fake kernels."""
        if made.op == "get_attr":
            return operator.attrgetter(str(made.target))(self._traced.module)
        args, kwargs = fx.map_arg((made.args, made.kwargs), self._values.__getitem__)
        try:
            with self.fake_mode, enable_python_dispatcher(), torch.no_grad():
                return made.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, ValueError) as error:
            raise NotStatic(f"it rejects the sizes: {first_line(error)}") from error


def _known_sizes(traced: TracedGraph, inputs: Mapping[str, torch.Tensor]) -> dict[sympy.Symbol, sympy.Integer]:
    """The number that each symbol in the sizes of the graph's inputs stands for.

    Raises:
        NotStatic: two of them contradict each other, or the graph.
    """
    given = [
        (node.name, dim, size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size), number)
        for node in traced.placeholders
        if node.name in inputs and isinstance(value(node), torch.Tensor)
        for dim, (size, number) in enumerate(zip(value(node).shape, inputs[node.name].shape, strict=True))
    ]
    known = {expression: sympy.Integer(number) for _, _, expression, number in given if expression.is_Symbol}
    for name, dim, expression, number in given:
        if expression.xreplace(known) != number:
            raise NotStatic(f"{name} has {number} in dim {dim}, where the graph has {expression.xreplace(known)}")
    return known


def _takes_tensor(user: fx.Node, lengths: fx.Node) -> bool:
    """True if ``user`` reads a list of lengths only where its form with tensors takes one."""
    names = LENGTHS.get(user.target, ())  # type: ignore[call-overload]
    others: set[fx.Node] = set()
    fx.map_arg((user.args, {name: given for name, given in user.kwargs.items() if name not in names}), others.add)
    return bool(names) and lengths not in others


def _parts(yielded: Any) -> list[Any]:
    """What a node yields, lists and tuples opened."""
    if isinstance(yielded, tuple | list):
        return [part for each in yielded for part in _parts(each)]
    return [yielded]
