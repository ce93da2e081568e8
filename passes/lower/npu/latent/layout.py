"""The columns that attention operands are made of: the layout of multi-head latent attention, by running it.

Models spell "split, expand, join, transpose" in a dozen ways. The chain of data movements behind an operand is run on
numbers that say where each element comes from; what comes out is the layout. See also ``passes.graph.head_layout``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from ....graph.data_movement import MOVES
from ....graph.evaluate import at_sizes, is_size
from ....graph.fx_nodes import METADATA_CALLS, argument, callee, is_dynamic, is_tensor, shape, value
from ....graph.record import NoMatch
from ....graph.region import Region
from ....graph.traced import TracedGraph

if TYPE_CHECKING:
    import sympy

_BLANK = frozenset("new_empty empty_like empty.memory_format".split())
_MOVES = MOVES | _BLANK | {"copy", "slice_scatter", "select_scatter"}
_TOKENS = 3
_MOST_STEPS = 200


@dataclass(frozen=True)
class Origins:
    """The origins of a tensor's elements, the same for every token.

    Attributes:
        sources: nodes that data movements lead back to.
        source: int64, of the tensor's shape without its dim of tokens: which source.
        column: int64, likewise: which of the source's elements of that token.
    """

    sources: tuple[fx.Node, ...]
    source: torch.Tensor
    column: torch.Tensor

    def columns(self, of: slice = slice(None)) -> tuple[fx.Node, torch.Tensor]:
        """The one source of some dims of the last axis, and the columns ``[..., dims]``.

        Raises:
            NoMatch: they come from several.
        """
        found = self.source[..., of].unique().tolist()
        if len(found) != 1:
            raise NoMatch("its elements come from several tensors")
        return self.sources[found[0]], self.column[..., of]


@dataclass(frozen=True)
class Rows:
    """Rows of a weight by head and dim: row ``first + head * per_head + dim * per_dim``."""

    first: int
    per_head: int
    per_dim: int
    heads: int
    dims: int

    @staticmethod
    def of(columns: torch.Tensor) -> Rows | None:
        """The rule of ``columns``, ``[heads, dims]``; None when there is none."""
        heads, dims = columns.shape
        first = int(columns[0, 0])
        per_head = int(columns[1, 0]) - first if heads > 1 else dims
        per_dim = int(columns[0, 1]) - first if dims > 1 else 1
        expected = first + torch.arange(heads)[:, None] * per_head + torch.arange(dims) * per_dim
        regular = per_head > 0 and per_dim > 0 and torch.equal(columns, expected)
        return Rows(first, per_head, per_dim, heads, dims) if regular else None

    @staticmethod
    def adjacent(first: int, count: int) -> Rows:
        """``count`` rows from ``first`` on."""
        return Rows(first, count, 1, 1, count)

    @property
    def last(self) -> int:
        return self.first + (self.heads - 1) * self.per_head + (self.dims - 1) * self.per_dim


class LayoutTracer:
    """Runs the data movements in front of tensors; those of one structure, which every layer repeats, once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[torch.Tensor, torch.Tensor]] | str] = {}

    def origins(self, node: fx.Node) -> Origins:
        """Find where the elements of ``node`` come from.

        Raises:
            NoMatch: the origins differ between tokens, or cannot be determined.
        """
        (found,) = self._run(node, [node])
        return found

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that data movements lead back to from ``node``."""
        return _movements(node)[1]

    def part(self, node: fx.Node, dims: slice) -> fx.Node | None:
        """The tensor ``[..., dims]`` of ``node``, ``[1, H, T, D]``; None where the graph does not have it."""
        sizes = [*map(str, shape(node)[:3]), str(dims.stop - dims.start)]
        inside, sources, _ = _movements(node)
        places = [n for n in (*sources, *inside) if is_tensor(n) and [str(s) for s in shape(n)] == sizes]
        try:
            whole, *found = self._run(node, [node, *places])
        except NoMatch:
            return None
        for place, there in zip(places, found, strict=True):
            same = torch.equal(there.column, whole.column[..., dims])
            if same and torch.equal(there.source, whole.source[..., dims]):
                return place
        return None

    def _run(self, node: fx.Node, wanted: Sequence[fx.Node]) -> list[Origins]:
        """The origins of ``wanted``, which stand between the sources of ``node`` and itself."""
        _, sources, blanks = _movements(node)
        dims = [_token_dim(n) for n in (*sources, *wanted)]
        region = Region((*sources, *blanks), wanted)
        key = (len(sources), region.signature())
        if key not in self._known:
            try:
                self._known[key] = _run(region, len(sources), dims)
            except NoMatch as error:
                self._known[key] = str(error)
        found = self._known[key]
        if isinstance(found, str):
            raise NoMatch(found)
        return [Origins(tuple(sources), source, column) for source, column in found]


def _movements(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Nodes that only move data on the way to ``node``; what they lead back to; and memory that they fill."""
    inside: list[fx.Node] = []
    sources: list[fx.Node] = []
    blanks: list[fx.Node] = []
    pending, seen = [node], set()
    while pending:
        n = pending.pop()
        if n in seen or is_size(n):
            continue
        seen.add(n)
        if len(seen) > _MOST_STEPS:
            raise NoMatch("too many operators stand behind it")
        name = callee(n)
        if name in _BLANK:
            blanks.append(n)
        elif name in _MOVES and (name != "getitem" or callee(n.args[0]) in _MOVES):
            inside.append(n)
            pending += [m for m in n.all_input_nodes if name not in METADATA_CALLS]
        else:
            sources.append(n)
    return sorted(inside), sorted(sources), blanks


def _run(region: Region, sources: int, dims: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Source and column of every element of the region's outputs.

    Args:
        region: whose first inputs are ``sources``, the others memory that is filled.
        dims: which dim counts tokens, of each source and each output.
    """
    sizes = {symbol: _TOKENS + 2 * i for i, symbol in enumerate(region.symbols)}
    given, starts, counts = [], [], []
    first = 0
    for source, dim in zip(region.inputs[:sources], dims, strict=False):
        blank = _blank(source, sizes)
        tokens, count = blank.shape[dim], blank.numel() // blank.shape[dim]
        numbers = torch.arange(first, first + blank.numel(), dtype=torch.float64)
        rest = [size for i, size in enumerate(blank.shape) if i != dim]
        given.append(blank.copy_(numbers.view(tokens, *rest).movedim(0, dim)))
        starts.append(first)
        counts.append(count)
        first += blank.numel()
    given += [_blank(n, sizes) for n in region.inputs[sources:]]
    try:
        results = region.run(sizes, given)
    except Exception as error:  # an operator that takes no such numbers
        raise NoMatch(f"its operators cannot be run alone: {str(error).splitlines()[0][:120]}") from error
    return [
        _decoded(result.movedim(dim, 0), starts, counts) for result, dim in zip(results, dims[sources:], strict=True)
    ]


def _blank(node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> torch.Tensor:
    v = value(node)
    shape_, strides = at_sizes((tuple(v.shape), tuple(v.stride())), sizes)
    return torch.empty_strided(shape_, strides, dtype=torch.float64).fill_(float("nan"))


def _token_dim(node: fx.Node) -> int:
    dims = [i for i, size in enumerate(shape(node)) if is_dynamic(size)]
    if len(dims) != 1:
        raise NoMatch(f"{node.name} has no dim, or several, that counts tokens")
    return dims[0]


def _decoded(found: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and column of each of ``found``, ``[T, ...]`` numbers that ``_run`` gave out."""
    if found.isnan().any():
        raise NoMatch("not all of it is written")
    numbers = found.long().contiguous()
    first = torch.tensor(starts)
    source = torch.bucketize(numbers, first, right=True) - 1
    place = numbers - first[source]
    count = torch.tensor(counts)[source]
    token, column = place // count, place % count
    row = torch.arange(len(found)).view(-1, *[1] * (found.dim() - 1))
    same = torch.equal(source, source[:1].expand_as(source)) and torch.equal(column, column[:1].expand_as(column))
    if not same or not torch.equal(token, row.expand_as(token)):
        raise NoMatch("it mixes tokens")
    return source[0], column[0]


@dataclass(frozen=True)
class LatentKeys:
    """Keys and values of one attention, made by one product from a latent that all heads share.

    Attributes:
        product: ``linear(latent, weight)``.
        shared: a part of the keys that is the same for all heads.
        shared_start: its first column.
        own: dims of a key's head that the product yields.
        rest: dims that are shared.
        key_rows: rows of the weight that make the former.
        value_rows: rows of the weight that make the values.
    """

    product: fx.Node
    shared: fx.Node
    shared_start: int
    own: slice
    rest: slice
    key_rows: Rows
    value_rows: Rows

    @property
    def latent(self) -> fx.Node:
        source: fx.Node = argument(self.product, 0, "input")
        return source

    @property
    def latent_dim(self) -> int:
        return int(shape(self.latent)[-1])

    @property
    def shared_width(self) -> int:
        """Columns of what all heads share and its neighbors, if it has any."""
        return _width(self.shared)

    @property
    def rotary_dim(self) -> int:
        return int(self.rest.stop - self.rest.start)


def latent_keys(tracer: LayoutTracer, key: fx.Node, val: fx.Node) -> LatentKeys | None:
    """The latent behind keys ``[1, H, T, D]`` and values ``[1, H, T, Dv]``; None when they are made without one.

    Raises:
        NoMatch: they are, but in a layout that is not regular.
    """
    try:
        product, columns = tracer.origins(val).columns()
    except NoMatch:
        return None
    value_rows = Rows.of(columns[0])
    sources = tracer.sources(key)
    others = [n for n in sources if n is not product]
    if callee(product) != "linear" or product not in sources or not others:
        return None
    if len(others) > 1:
        if any(_width(n) > shape(key)[3] for n in others):
            return None  # more than one head has
        raise NoMatch(f"its keys are made of {len(others)} tensors besides the product of its values")
    keys = tracer.origins(key)
    from_product = keys.source[0] == keys.sources.index(product)
    if not torch.equal(from_product, from_product[:1].expand_as(from_product)):
        raise NoMatch("its heads do not have the same dims from the latent")
    own, rest = _span(from_product[0]), _span(~from_product[0])
    if own is None or rest is None:
        raise NoMatch("the dims of a key that come from the latent do not lie together")
    shared, columns = keys.columns(rest)
    if not torch.equal(columns[0], columns[0, :1].expand_as(columns[0])):
        return None  # every head has a part of its own
    start = int(columns[0, 0, 0])
    if not torch.equal(columns[0, 0], torch.arange(start, start + columns.shape[-1])):
        raise NoMatch("the part of the keys that all heads share is rearranged")
    key_rows = Rows.of(keys.column[0][:, own])
    if any(size != 1 for size in shape(shared)[: _token_dim(shared)]):
        raise NoMatch("the part of the keys that all heads share does not have the tokens first")
    if key_rows is None or value_rows is None:
        raise NoMatch("keys or values lie in no regular order in what the product yields")
    return LatentKeys(product, shared, start, own, rest, key_rows, value_rows)


def _width(node: fx.Node) -> int:
    """Elements for each token."""
    return math.prod(int(size) for size in shape(node) if not is_dynamic(size))


def _span(chosen: torch.Tensor) -> slice | None:
    """The dims that are set, where they lie together; None where they do not or there are none."""
    (dims,) = chosen.nonzero(as_tuple=True)
    if not len(dims) or int(dims[-1]) - int(dims[0]) + 1 != len(dims):
        return None
    return slice(int(dims[0]), int(dims[-1]) + 1)


def weight_rows(traced: TracedGraph, product: fx.Node, rows: Rows) -> tuple[str, torch.Tensor]:
    """Rows of the weight of a linear, as a view ``[heads, dims, features]``, and the name of the parameter.

    A weight that ``merge_linears`` has made of several parameters is looked up in these: the merged tensor is there
    once the graph is linked only.

    Raises:
        NoMatch: the weight is computed, or the rows belong to several parameters.
    """
    if argument(product, 2, "bias") is not None:
        raise NoMatch("its product adds a bias")
    weight = argument(product, 1, "weight")
    start = 0
    for name in traced.notes.merged.get(weight.name, (weight.name,)):
        tensor = traced.constants.get(name)
        if tensor is None or tensor.dim() != 2 or not tensor.is_contiguous():
            raise NoMatch("the weight of its product is not a parameter that is stored row by row")
        if start <= rows.first and rows.last < start + len(tensor):
            features = tensor.shape[1]
            offset = tensor.storage_offset() + (rows.first - start) * features
            strides = (rows.per_head * features, rows.per_dim * features, 1)
            return name, tensor.detach().as_strided((rows.heads, rows.dims, features), strides, offset)
        start += len(tensor)
    raise NoMatch("the rows of its weight belong to several parameters")


def add_weight(traced: TracedGraph, name: str, view: torch.Tensor) -> fx.Node:
    """A graph input that receives ``view``, a part of a parameter; the same one for the same part."""
    while name in traced.constants:
        there = traced.constants[name]
        if there.data_ptr() == view.data_ptr() and (there.shape, there.stride()) == (view.shape, view.stride()):
            return traced.placeholder(name)
        name += "_"
    with traced.fake_mode:
        example = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    node = traced.add_deferred_constant(name, example)
    traced.constants[node.name] = view
    return node


def forget_unread_merges(traced: TracedGraph) -> None:
    """Take back the merging of weights that nothing reads merged any longer, before it moves them."""
    for node in traced.placeholders:
        if node.name in traced.notes.merged and not node.users:
            del traced.notes.merged[node.name]
            traced.constants.pop(node.name, None)
            traced.graph.erase_node(node)
