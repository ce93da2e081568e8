"""The parts of queries and keys of latent attention: the one that meets the latent, and the rotated one."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ....graph.fx_nodes import callee, shape, value
from ....graph.record import NoMatch
from ..site import Site
from .layout import LatentKeys, LayoutTracer

_aten = torch.ops.aten
_ROPE = torch.ops.pagoda.rope.default
_TO_HALF = "interleaved_to_half"


@dataclass(frozen=True)
class HeadSlice:
    """Dims of the heads of a ``[1, H, T, D]`` tensor."""

    node: fx.Node
    dims: slice

    def by_token(self, site: Site) -> fx.Node:
        """``[1, T, H, dims]``."""
        node = self.node
        if shape(node)[1] == 1:  # a view, where a transpose may be a copy
            rows = site.traced.call(_aten.reshape.default, node, [1, -1, 1, int(shape(node)[3])])
        else:
            rows = site.tokens_first(node)
        if (self.dims.start, self.dims.stop) == (0, shape(node)[3]):
            return rows
        return site.traced.call(_aten.slice.Tensor, rows, -1, self.dims.start, self.dims.stop)


@dataclass(frozen=True)
class Rotation:
    """A rotation of all dims of a part: its input, and the arguments of ``pagoda::rope``."""

    before: HeadSlice
    cos: fx.Node
    sin: fx.Node
    mode: str
    rounds: bool

    def check_pairs(self) -> None:
        """Raise ``NoMatch`` unless its inputs are pairs."""
        if self.mode not in (_TO_HALF, "interleaved"):
            raise NoMatch("it rotates halves, the operator pairs")

    def in_halves(self, site: Site) -> Rotation:
        """The same with the result in halves where it would be in pairs.

        Raises:
            NoMatch: its inputs are not pairs.
        """
        self.check_pairs()
        if self.mode == _TO_HALF:
            return self
        return replace(self, cos=_halves(site, self.cos), sin=_halves(site, self.sin), mode=_TO_HALF)

    def by_token(self, site: Site) -> fx.Node:
        """The rotated ``[T, H, R]``."""
        rows = self.before.by_token(site)
        heads_first = site.traced.call(_aten.transpose.int, rows, 1, 2)
        whole = site.traced.call(_ROPE, [heads_first], self.cos, self.sin, self.mode, 0, self.rounds)
        rotated = site.traced.call(operator.getitem, whole, 0)
        return heads_by_token(site, site.traced.call(_aten.transpose.int, rotated, 1, 2))

    def table(self, site: Site, name: str, sizes: list[int]) -> fx.Node:
        """``cos`` or ``sin`` in the dtype of what is rotated, ``[1, T, R]`` as a tensor of other sizes."""
        table = site.cast(getattr(self, name), value(self.before.node).dtype)
        return site.traced.call(_aten.reshape.default, table, sizes)


def heads_by_token(site: Site, rows: fx.Node) -> fx.Node:
    """``[1, T, H, D]`` as ``[T, H, D]``."""
    return site.traced.call(_aten.reshape.default, rows, [-1, *(int(size) for size in shape(rows)[2:])])


def _halves(site: Site, table: fx.Node) -> fx.Node:
    """``[1, T, R]`` with the entries of the first of each pair in front of those of the second."""
    parts = [site.aten(_aten.slice.Tensor, table, -1, first, int(shape(table)[-1]), 2) for first in (0, 1)]
    return site.aten(_aten.cat.default, parts, -1)


@dataclass(frozen=True)
class Query:
    """The two parts of queries ``[1, H, T, D]``.

    Attributes:
        content: meets the latent.
        rest: meets what all heads share, rotated.
        rotation: how ``rest`` was rotated; None when it was not, or not as a whole.
    """

    content: HeadSlice
    rest: HeadSlice | None
    rotation: Rotation | None

    @staticmethod
    def of(tracer: LayoutTracer, node: fx.Node, latent: LatentKeys) -> Query:
        """The parts of a query that meet ``latent``."""
        rotation = _rotation(node, latent.rest)
        if rotation is not None:  # of some dims of a whole head
            return Query(HeadSlice(rotation.before.node, latent.own), None, rotation)
        content, rest = (tracer.part(node, dims) for dims in (latent.own, latent.rest))
        return Query(
            HeadSlice(node, latent.own)
            if content is None
            else HeadSlice(content, slice(0, latent.own.stop - latent.own.start)),
            HeadSlice(node, latent.rest) if rest is None else HeadSlice(rest, slice(0, latent.rotary_dim)),
            None if rest is None else _rotation(rest, slice(0, latent.rotary_dim)),
        )

    def rest_by_token(self, site: Site) -> fx.Node:
        """The part that meets what all heads share, ``[T, H, R]``."""
        if self.rotation is not None:
            return self.rotation.by_token(site)
        assert self.rest is not None
        return site.dense(heads_by_token(site, self.rest.by_token(site)))


def _rotation(node: fx.Node, dims: slice) -> Rotation | None:
    """The rotation of exactly ``dims`` of ``node``; None when they were not rotated."""
    whole: Any = node.args[0] if callee(node) == "getitem" else None
    if whole is None or whole.target is not _ROPE:
        return None
    xs, cos, sin, mode, start, rounds = whole.args
    if (start, start + int(shape(cos)[-1])) != (dims.start, dims.stop):
        return None
    item: Any = node.args[1]
    return Rotation(HeadSlice(xs[item], dims), cos, sin, mode, rounds)


def shared_rotation(latent: LatentKeys) -> Rotation | None:
    """The rotation of all that the heads share; None when it was not rotated."""
    if latent.shared_start or shape(latent.shared)[1:2] + shape(latent.shared)[3:] != (1, latent.rotary_dim):
        return None
    return _rotation(latent.shared, slice(0, latent.rotary_dim))


def shared_by_token(site: Site, latent: LatentKeys) -> fx.Node:
    """The part of the keys that all heads share, ``[T, 1, R]``."""
    rotation = shared_rotation(latent)
    if rotation is not None:
        return rotation.by_token(site)
    rows = site.traced.call(_aten.reshape.default, latent.shared, [-1, latent.shared_width])
    if latent.shared_width != latent.rotary_dim:
        end = latent.shared_start + latent.rotary_dim
        rows = site.traced.call(_aten.slice.Tensor, rows, -1, latent.shared_start, end)
    return site.dense(site.traced.call(_aten.unsqueeze.default, rows, 1))
