"""The prolog of latent attention, all that comes before it attends, in one operator.

Matches:
    latent = rms_norm(y[..., a : a + 512]);  shared = rope(y[..., a + 512 : a + 576])         # and further above
    y = linear(x, W);  query = [content, rope(rotated)] of linear(rms_norm(linear(x, Wq)), Wqb)
Becomes:
    npu_kv_rmsnorm_rope_cache_v2(y[..., a : a + 576], gamma, cos, sin, slots, rotated cache, latent cache)
    npu_mla_prolog_v3(x, Wq.T, Wqb.T, W_uk, W.T, gamma_q, gamma, sin, cos, latent cache, rotated cache, ...)
Why it is faster:
    one launch instead of three (norm, rotation, cache write), or instead of nine.

Both rotate pairs and leave the result in halves. A model that leaves it in pairs gets the same scores, if its queries
are left in halves too: a score is a sum over the dims, whatever their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from ....graph.fx_nodes import argument, callee, closure, shape, value
from ....graph.record import NoMatch
from ..site import Site
from .layout import LatentKeys, LayoutTracer, Rows, add_weight, weight_rows
from .parts import HeadSlice, Query, Rotation, shared_rotation

KV_NORM = "npu.npu_kv_rmsnorm_rope_cache_v2"
PROLOG = "npu.npu_mla_prolog_v3"

_pagoda, _npu, _aten = torch.ops.pagoda, torch.ops.npu, torch.ops.aten


@dataclass(frozen=True)
class _Normed:
    """``rms_norm(source[..., first : first + size])``, which ``node`` is."""

    node: fx.Node
    source: fx.Node
    first: int
    size: int
    gamma: fx.Node
    eps: float

    @staticmethod
    def of(tracer: LayoutTracer, node: fx.Node, what: str) -> _Normed:
        """The norm that made ``node``, of one head.

        Raises:
            NoMatch: not so.
        """
        norm, columns = tracer.origins(node).columns()
        if norm.target is not _pagoda.rms_norm.default or not _in_order(columns, 0):
            raise NoMatch(f"{what} is not the result of an RMS norm")
        x, gamma, eps, offset, _ = norm.args
        if gamma is None or offset:
            raise NoMatch(f"the scale of the norm of {what} is missing or stored less {offset}")
        source, columns = tracer.origins(x).columns()  # type: ignore[arg-type]
        first = int(columns.flatten()[0])
        if not _in_order(columns, first):
            raise NoMatch(f"what is normed to {what} does not lie together")
        return _Normed(norm, source, first, columns.numel(), gamma, eps)  # type: ignore[arg-type]


def _in_order(columns: torch.Tensor, first: int) -> bool:
    return torch.equal(columns.flatten(), torch.arange(first, first + columns.numel()))


@dataclass(frozen=True)
class Compressed:
    """A latent and what is rotated for all heads, side by side in one tensor.

    Attributes:
        normed: how the latent is made.
        rotation: of the other part.
    """

    normed: _Normed
    rotation: Rotation

    @staticmethod
    def of(tracer: LayoutTracer, latent: LatentKeys) -> Compressed:
        """The norm and the rotation that make the two parts of ``latent``.

        Raises:
            NoMatch: not by a norm and a rotation of neighbors.
        """
        normed = _Normed.of(tracer, latent.latent, "the latent")
        rotation = shared_rotation(latent)
        if rotation is None:
            raise NoMatch("what all heads share is not rotated as a whole")
        source, columns = tracer.origins(rotation.before.node).columns()
        if source is not normed.source or not _in_order(columns, normed.first + normed.size):
            raise NoMatch("what is rotated does not lie behind the latent in one tensor")
        return Compressed(normed, rotation)

    @property
    def width(self) -> int:
        return self.normed.size + int(shape(self.rotation.cos)[-1])


@dataclass(frozen=True)
class Place:
    """A latent attention that is being lowered.

    Attributes:
        site: of the attention.
        tracer: what runs data movements.
        latent: its keys.
        query: its queries.
        slots: ``[T]``, where the step's tokens go.
        latent_cache: ``[blocks, tokens, 1, latent]``.
        rotated_cache: ``[blocks, tokens, 1, R]``.
        selected: the keys that an indexer chooses.
    """

    site: Site
    tracer: LayoutTracer
    latent: LatentKeys
    query: Query
    slots: fx.Node
    latent_cache: fx.Node
    rotated_cache: fx.Node
    selected: fx.Node | None = None


def write_normed_and_rotated(place: Place) -> fx.Node | None:
    """Norm, rotate and write both parts of the keys in one operator.

    Returns:
        the part of the queries that meets the rotated one, ``[T, H, R]``; None where the operator is not legal.
    """
    site, query = place.site, place.query
    try:
        found = Compressed.of(place.tracer, place.latent)
        rotation = found.rotation.in_halves(site)
        if rotation is not found.rotation and (query.rotation is None or query.rotation.mode != found.rotation.mode):
            raise NoMatch("its queries cannot be left in halves as the operator leaves the keys")
    except NoMatch as error:
        site.refuse(KV_NORM, str(error))
        return None
    normed = found.normed
    rows = normed.source
    if shape(rows)[-1] != found.width:
        rows = site.traced.call(_aten.slice.Tensor, rows, -1, normed.first, normed.first + found.width)
    # One sequence of T tokens: with T sequences of one token the operator would ask for as many blocks.
    rows = site.dense(site.traced.call(_aten.reshape.default, rows, [1, 1, -1, found.width]))
    tables = [rotation.table(site, name, [1, 1, -1, place.latent.rotary_dim]) for name in ("cos", "sin")]
    done = site.call(
        _npu.npu_kv_rmsnorm_rope_cache_v2.default,
        *(rows, normed.gamma, *tables, place.slots, place.rotated_cache, place.latent_cache),
        epsilon=normed.eps,
        cache_mode="PA_BNSD",
        is_output_kv=False,
    )
    if done is None:
        return None
    if rotation is not found.rotation:
        assert query.rotation is not None
        query = replace(query, rotation=query.rotation.in_halves(site))
    return query.rest_by_token(site)


def prolog(place: Place, key_weight: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Do all that stands between the hidden states and the attention in one operator.

    Args:
        place: the attention.
        key_weight: ``[H, D, latent]``.

    Returns:
        queries in the latent's dims, ``[T, H, latent]``, and their rotated part, ``[T, H, R]``; None where the
        operator is not legal. An indexer that reads the norm that queries are made from then reads the operator's.
    """
    site = place.site
    try:
        found = Compressed.of(place.tracer, place.latent)
        found.rotation.check_pairs()
        made = _Products.of(place, found)
    except NoMatch as error:
        site.refuse(PROLOG, str(error))
        return None
    norm, others = made.compressed.node, made.others
    if others and not _hoisted(norm, found.rotation.cos, found.rotation.sin, found.normed.gamma):
        others = []  # they keep a norm of their own
    with site.traced.before(norm if others else site.node, like=site.node):
        results = _inserted(place, found, made, key_weight, with_norm=bool(others))
        if results is None:
            return None
        if others:
            normed = site.traced.call(_aten.reshape.default, site.item(results, 3), [1, -1, made.compressed.size])
            for other in others:
                other.replace_input_with(norm, normed)
        return site.item(results, 0), site.item(results, 1)


def _readers_for(made: fx.Node | None, of: fx.Node) -> list[fx.Node]:
    """What reads ``of`` that ``made`` is made of."""
    behind = set() if made is None else set(closure(made))
    return [user for user in of.users if user in behind]


def _hoisted(before: fx.Node, *nodes: fx.Node) -> bool:
    """Move ``nodes`` and what they are made of in front of ``before``; False where they are made of that."""
    needed = {each for node in nodes for each in closure(node)}
    if before in needed:
        return False
    for node in sorted(each for each in needed if before < each):
        before.prepend(node)
    return True


def _inserted(
    place: Place, found: Compressed, made: _Products, key_weight: fx.Node, *, with_norm: bool
) -> fx.Node | None:
    """The operator's call, at the graph's insertion point; None where it is not legal."""
    site, rotation = place.site, found.rotation.in_halves(place.site)
    tokens = site.dense(site.traced.call(_aten.reshape.default, made.hidden, [-1, int(shape(made.hidden)[-1])]))
    sin, cos = (rotation.table(site, name, [-1, place.latent.rotary_dim]) for name in ("sin", "cos"))
    results = site.call(
        _npu.npu_mla_prolog_v3.default,
        *(tokens, made.down_queries, made.up_queries, key_weight, made.down_keys),
        *(made.compressed.gamma, found.normed.gamma, sin, cos, place.latent_cache, place.rotated_cache),
        cache_index=place.slots,
        rmsnorm_epsilon_cq=made.compressed.eps,
        rmsnorm_epsilon_ckv=found.normed.eps,
        cache_mode="PA_BSND",
        query_norm_flag=with_norm,
    )
    if results is None:
        return None
    yielded, given = value(results)[0].dtype, value(tokens).dtype
    if yielded is not given:  # by torch_npu's own meta function
        site.retry()
        site.refuse(PROLOG, f"its results are {yielded} where token_x is {given}")
        site.traced.graph.erase_node(results)
        return None
    return results


@dataclass(frozen=True)
class _Products:
    """The products that make queries and the latent from the hidden states.

    Attributes:
        hidden: ``[1, T, hidden]``.
        compressed: the norm of what queries are made from.
        down_queries: weight that makes the latter, ``[hidden, compressed]``.
        up_queries: weight that makes queries of it, ``[compressed, H * (D + R)]``.
        down_keys: weight that makes the latent and what is rotated for all heads, ``[hidden, latent + R]``.
        others: what reads the norm for an indexer.
    """

    hidden: fx.Node
    compressed: _Normed
    down_queries: fx.Node
    up_queries: fx.Node
    down_keys: fx.Node
    others: list[fx.Node]

    @staticmethod
    def of(place: Place, found: Compressed) -> _Products:
        """The products around ``found``.

        Raises:
            NoMatch: queries and keys are not made as the operator makes them.
        """
        rotation, keys, normed = place.query.rotation, found.rotation, found.normed
        if rotation is None or (rotation.cos, rotation.sin, rotation.mode) != (keys.cos, keys.sin, keys.mode):
            raise NoMatch("queries and keys are not rotated alike")
        (up, content), (same, rotated) = (_columns(place, part) for part in (place.query.content, rotation.before))
        size, dims = content.shape[-1], content.shape[-1] + rotated.shape[-1]
        rows = Rows(int(content[0, 0]), dims, 1, len(content), dims)
        if up is not same or Rows.of(torch.cat([content, rotated], -1)) != rows:
            raise NoMatch(f"heads of queries are not {size} dims and {dims - size} rotated ones of one product")
        if callee(up) != "linear" or callee(normed.source) != "linear":
            raise NoMatch("queries, or the latent and what is rotated with it, are not made by a product")
        hidden = argument(normed.source, 0, "input")
        compressed = _Normed.of(place.tracer, argument(up, 0, "input"), "what queries are made from")
        if callee(compressed.source) != "linear" or argument(compressed.source, 0, "input") is not hidden:
            raise NoMatch("queries and the latent are not compressed from the same hidden states")
        down_queries, up_queries, down_keys = (
            _transposed(place.site, product, part)
            for product, part in (
                (compressed.source, Rows.adjacent(compressed.first, compressed.size)),
                (up, rows),
                (normed.source, Rows.adjacent(normed.first, found.width)),
            )
        )
        others = _readers_for(place.selected, compressed.node)
        return _Products(hidden, compressed, down_queries, up_queries, down_keys, others)


def _transposed(site: Site, product: fx.Node, rows: Rows) -> fx.Node:
    """Rows of a product's weight as the columns of a matrix."""
    name, view = weight_rows(site.traced, product, rows)
    return add_weight(site.traced, f"transposed_{name}", view.flatten(0, 1).t())


def _columns(place: Place, part: HeadSlice) -> tuple[fx.Node, torch.Tensor]:
    """The one product that a part comes from, and its columns, ``[H, dims]``."""
    source, columns = place.tracer.origins(part.node).columns(part.dims)
    return source, columns[0]
