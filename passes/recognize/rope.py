"""Recognize rotary position embeddings.

Matches:
    x * cos + rotate(x) * sin            # halves, interleaved pairs, complex products; all or some of the head dims
Becomes:
    (y,) = pagoda::rope([x], cos, sin, mode, start, round_products)      # x: [B, H, T, D]; cos, sin: [B | 1, T, R]
Why it is faster:
    one pass over queries and keys instead of nine operators, three of them copies; and it is what targets have.

Level 2. Recognized by running: the nodes between a tensor and its rotated form are run on random tensors and random
tables, and whatever canonical rotation gives the same numbers is what they are. Source of the operator: Su et al.,
RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...runtime.ops.attention.rope import rope_reference
from ..graph.data_movement import MOVES
from ..graph.evaluate import at_sizes, is_size
from ..graph.fx_nodes import callee, is_dynamic, is_tensor, shape, value
from ..graph.record import PassRecord
from ..graph.region import OpenRegion, Region
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph

ROPE = torch.ops.pagoda.rope.default

# By how tables of half the width are widened ("" for full ones): the modes that read them so.
MODES_OF = {
    "": ("half", "interleaved", "interleaved_to_half"),
    "cat": ("half", "interleaved_to_half"),
    "repeat": ("interleaved",),
}
# What yields values that depend on the tokens. Rotary tables are made of buffers and positions alone.
_TOKENS = frozenset(
    "linear mm addmm embedding rms_norm layer_norm native_layer_norm paged_attention attention "
    "grouped_mm_fallback".split()
)
_LAYOUT = MOVES | {"neg", "_to_copy", "view_as_complex", "view_as_real"}
_REGION = _LAYOUT | frozenset("mul.Tensor add.Tensor sub.Tensor".split())
_DEEPEST = 14
_LARGEST = 60
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}


@dataclass(frozen=True)
class _Rotation:
    """The rotation of a region: the arguments of ``pagoda::rope``, with its tables by their place in the frontier."""

    mode: str
    start: int
    cos: int
    sin: int  # the same as cos: a complex table
    widen: str  # "": tables are as wide as what they rotate; "cat" or "repeat": half as wide
    backwards: bool = False  # by the negative angle


def recognize_rope(traced: TracedGraph) -> PassRecord:
    """Replace every rotation of a ``[B, H, T, D]`` or ``[B, T, H, D]`` tensor by ``pagoda::rope``."""
    finder = _Finder(traced)
    consumed: set[fx.Node] = set()

    def step(node: fx.Node) -> str | None:
        if node in consumed or not finder.mixes(node):
            return None
        region = finder.largest(node)
        if region is not None:
            consumed.update(region.nodes)
            _replace(traced, region, finder)
            return ""
        if not finder.rotates(node):
            return None
        consumed.update(n for below in finder.below(node) for n in (below, *below.all_input_nodes))
        return finder.why

    return rewrite_each(traced, "recognize_rope", step)


@dataclass(frozen=True)
class _Region:
    """Nodes that rotate ``entry`` into ``output``."""

    entry: fx.Node
    output: fx.Node
    tables: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]
    rotation: _Rotation


class _Finder:
    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self.tokens: set[fx.Node] = set()
        for node in traced.graph.nodes:
            looked_up = callee(node) == "embedding" and traced.paged and not self._reads_token_ids(node)
            if (callee(node) in _TOKENS and not looked_up) or any(n in self.tokens for n in node.all_input_nodes):
                self.tokens.add(node)
        self.known: dict[Hashable, _Rotation | None] = {}
        self.widened: dict[tuple[fx.Node, str], fx.Node] = {}
        self.why = ""

    def _reads_token_ids(self, node: fx.Node) -> bool:
        """Tell whether an embedding is looked up by what the tokens are; else by where they stand."""
        pending, seen = [node], set()
        while pending:
            n = pending.pop()
            if n.name == self.traced.input_ids:
                return True
            if n not in seen and not is_size(n):
                seen.add(n)
                pending += n.all_input_nodes
        return False

    def mixes(self, node: fx.Node) -> bool:
        """Tell whether ``node`` multiplies a token's values with a table."""
        if callee(node) != "mul.Tensor" or len(node.all_input_nodes) != 2 or node not in self.tokens:
            return False
        tables = [n for n in node.all_input_nodes if n not in self.tokens]
        if len(tables) != 1 or not (value(tables[0]).is_floating_point() or value(tables[0]).is_complex()):
            return False
        # In a call of the user's own the number of tokens may be fixed.
        varies = not self.traced.paged or any(is_dynamic(s) for s in shape(tables[0]))
        return len(shape(tables[0])) >= 2 and varies

    def rotates(self, node: fx.Node) -> bool:
        """Tell whether ``node`` looks like a part of a rotation: below it products with two tables meet."""
        tables = set()
        for n in self.below(node):
            for product in (n, *n.all_input_nodes):
                if self.mixes(product):
                    tables |= set(product.all_input_nodes) - self.tokens
        return len(tables) >= 2 or any(value(t).is_complex() for t in tables)

    def largest(self, node: fx.Node) -> _Region | None:
        """The largest rotation that ``node`` is a part of."""
        self.why = "its nodes do not rotate a [B, H, T, D] tensor in a known way"
        entries = list(self._above(node))[::-1]  # farthest first
        for output in reversed(self.below(node)):
            if len(shape(output)) != 4:
                continue
            for entry in entries:
                if str(shape(entry)) != str(shape(output)) or value(entry).dtype != value(output).dtype:
                    continue
                inside = self._between(output, entry)
                if inside is None:
                    continue
                tables = self._tables(inside)
                if not 1 <= len(tables) <= 2 or _heads_dim(entry, tables) is None:
                    continue
                rotation = self._rotation(entry, output, tables)
                if rotation is not None:
                    return _Region(entry, output, tables, frozenset(inside), rotation)
        return None

    def below(self, node: fx.Node) -> list[fx.Node]:
        """``node`` and what the region's operators make of it, nearest first."""
        found, level = [node], [node]
        for _ in range(_DEEPEST):
            level = [u for n in level for u in n.users if callee(u) in _REGION and u not in found]
            level = list(dict.fromkeys(level))
            if not level or len(found) > _LARGEST:
                break
            found += level
        return found

    def _above(self, node: fx.Node) -> Iterator[fx.Node]:
        """The tensor that ``node`` multiplies, and those that it is a rearrangement of, nearest first."""
        seen: set[fx.Node] = set()
        level = [n for n in node.all_input_nodes if n in self.tokens]
        for _ in range(_DEEPEST):
            following = []
            for n in level:
                if n in seen or (not is_tensor(n) and callee(n) not in _LAYOUT):
                    continue
                seen.add(n)
                if is_tensor(n):
                    yield n
                if callee(n) in _LAYOUT:
                    following += [m for m in n.all_input_nodes if m in self.tokens]
            level = following

    def _between(self, output: fx.Node, entry: fx.Node) -> set[fx.Node] | None:
        """The token nodes from ``entry``, without it, to ``output``; None when others lead there too."""
        if output is entry:
            return None
        inside: set[fx.Node] = set()
        pending = [output]
        while pending:
            node = pending.pop()
            if node in inside or node is entry or node not in self.tokens:
                continue
            if callee(node) not in _REGION or len(inside) > _LARGEST:
                return None
            inside.add(node)
            pending += node.all_input_nodes
        if any(user not in inside for node in inside if node is not output for user in node.users):
            return None  # what is in between is needed elsewhere and would be computed twice
        return inside if any(entry in n.all_input_nodes for n in inside) else None

    def _tables(self, inside: set[fx.Node]) -> tuple[fx.Node, ...]:
        order = sorted(inside, key=lambda n: n)  # graph order
        tables = [t for n in order for t in n.all_input_nodes if t not in self.tokens and not is_size(t)]
        return tuple(dict.fromkeys(tables))

    def _rotation(self, entry: fx.Node, output: fx.Node, tables: tuple[fx.Node, ...]) -> _Rotation | None:
        """The rotation of the region; regions of one structure are run once."""
        try:
            region = Region((entry, *tables), (output,))
        except OpenRegion as error:
            self.why = str(error)
            return None
        key = region.signature()
        if key not in self.known:
            self.known[key] = self._run(region)
        return self.known[key]

    def _run(self, region: Region) -> _Rotation | None:
        entry, *tables = region.inputs
        generator = torch.Generator().manual_seed(0)
        sizes = {symbol: 3 + 2 * i for i, symbol in enumerate(region.symbols)}

        def draw(node: fx.Node) -> torch.Tensor:
            v = value(node)
            kind = torch.complex64 if v.is_complex() else torch.float32
            return torch.randn(at_sizes(tuple(v.shape), sizes), generator=generator, dtype=kind).to(v.dtype)

        x, *drawn = given = [draw(node) for node in region.inputs]
        try:
            (found,) = region.run(sizes, given)
        except Exception as error:  # views that need other sizes, operators that refuse these
            self.why = f"its nodes could not be run in isolation: {str(error).splitlines()[0][:120]}"
            return None
        if not found.numel():
            return None
        if _heads_dim(entry, tables) == 2:
            x, found = x.transpose(1, 2), found.transpose(1, 2)
        tolerance = _TOLERANCE.get(found.dtype, 0.05)
        for rotation in _candidates(drawn, x.shape[-1]):
            cos = _table(drawn[rotation.cos], rotation.widen, 0)
            sin = _table(drawn[rotation.sin], rotation.widen, 1)
            if cos.dim() != 3 or cos.shape[-1] % 2 or rotation.start + cos.shape[-1] > x.shape[-1]:
                continue
            if rotation.backwards:
                sin = -sin
            (y,) = rope_reference([x], cos, sin, rotation.mode, rotation.start, False)
            if float((y - found).abs().max()) <= tolerance * max(1.0, float(y.abs().max())):
                return rotation
        return None


def _heads_dim(node: fx.Node, tables: Sequence[fx.Node]) -> int | None:
    """The dim of a 4-dimensional tensor that counts heads: 1 in ``[B, H, T, D]``, 2 in ``[B, T, H, D]``.

    It is the one along which the tables are the same.
    """
    sizes = [str(s) for s in shape(node)]
    table = ["1", "1", "1", *(str(s) for s in shape(tables[0]))][-4:]
    if table[1] == "1" and table[2] == sizes[2]:
        return 1
    if table[2] == "1" and table[1] == sizes[1]:
        return 2
    return None


def _candidates(tables: Sequence[torch.Tensor], dim: int) -> Iterator[_Rotation]:
    """The rotations that tables of these widths can be for, of tensors with ``dim`` dims a head."""
    width = tables[0].shape[-1]
    if tables[0].is_complex():
        if len(tables) == 1:
            for start in dict.fromkeys((0, dim - 2 * width)):
                yield _Rotation("interleaved", start, 0, 0, "repeat")
        return
    if len(tables) != 2:
        return
    for widen, full in (("", width), ("cat", 2 * width), ("repeat", 2 * width)):
        for cos, sin in ((0, 1), (1, 0)):
            for start in dict.fromkeys((0, dim - full)):
                if start >= 0 and full <= dim:
                    for mode in MODES_OF[widen]:
                        yield _Rotation(mode, start, cos, sin, widen)
                        yield _Rotation(mode, start, cos, sin, widen, backwards=True)


def _table(table: torch.Tensor, widen: str, part: int) -> torch.Tensor:
    """A table as ``[B | 1, T, R]``."""
    if table.is_complex():
        table = torch.view_as_real(table)[..., part]
    if table.dim() == 2:
        table = table[None]
    elif table.dim() == 4:
        table = table.squeeze(1) if table.shape[1] == 1 else table.squeeze(2)
    if widen == "cat":
        return torch.cat((table, table), -1)
    return table.repeat_interleave(2, -1) if widen else table


def _replace(traced: TracedGraph, region: _Region, finder: _Finder) -> None:
    rotation = region.rotation
    cos = _insert_table(traced, region.tables[rotation.cos], rotation.widen, 0, finder.widened)
    sin = _insert_table(traced, region.tables[rotation.sin], rotation.widen, 1, finder.widened)
    if rotation.backwards:
        sin = _insert_negative(traced, sin, finder.widened)
    half = value(region.entry).dtype in (torch.bfloat16, torch.float16)
    products = [n for n in region.nodes if finder.mixes(n)]
    rounds = half and all(value(n).dtype == value(region.entry).dtype for n in products)
    with traced.before(region.output):
        x = region.entry
        swapped = _heads_dim(x, region.tables) == 2
        if swapped:
            x = traced.call(torch.ops.aten.transpose.int, x, 1, 2)
        rotated = traced.call(ROPE, [x], cos, sin, rotation.mode, rotation.start, rounds)
        new = traced.call(operator.getitem, rotated, 0)
        if swapped:
            new = traced.call(torch.ops.aten.transpose.int, new, 1, 2)
    for node in (x, rotated, new):
        finder.tokens.add(node)
    traced.substitute(region.output, new)


def _behind(node: fx.Node) -> fx.Node:
    """The first node after ``node`` that something can be inserted in front of."""
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place


def _insert_negative(traced: TracedGraph, table: fx.Node, known: dict[tuple[fx.Node, str], fx.Node]) -> fx.Node:
    if (table, "negative") not in known:
        with traced.before(_behind(table), like=table):
            known[table, "negative"] = traced.call(torch.ops.aten.neg.default, table)
    return known[table, "negative"]


def _insert_table(
    traced: TracedGraph, table: fx.Node, widen: str, part: int, known: dict[tuple[fx.Node, str], fx.Node]
) -> fx.Node:
    """A table as ``[B | 1, T, R]``, made right behind the table, once for all layers."""
    key = (table, f"{widen}{part if value(table).is_complex() else ''}")
    if key in known:
        return known[key]
    aten = torch.ops.aten
    with traced.before(_behind(table), like=table):
        node = table
        if value(table).is_complex():
            node = traced.call(aten.select.int, traced.call(aten.view_as_real.default, node), -1, part)
        if len(shape(node)) == 2:
            node = traced.call(aten.unsqueeze.default, node, 0)
        elif len(shape(node)) == 4:
            node = traced.call(aten.squeeze.dim, node, 1 if str(shape(node)[1]) == "1" else 2)
        if widen == "cat":
            node = traced.call(aten.cat.default, [node, node], -1)
        elif widen == "repeat":
            sizes = shape(node)
            pairs = traced.call(aten.expand.default, traced.call(aten.unsqueeze.default, node, -1), [-1, -1, -1, 2])
            node = traced.call(aten.flatten.using_ints, traced.call(aten.clone.default, pairs), 2, 3)
            assert len(sizes) == 3
    known[key] = node
    return node
