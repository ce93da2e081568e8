"""Rows of paged caches, written where no operator writes all caches of a layer at once."""

from __future__ import annotations

import torch
from torch import fx

from ....graph.fx_nodes import value
from ....graph.traced import UnsupportedModel
from ..site import Site

_npu, _aten = torch.ops.npu, torch.ops.aten


def block_and_offset(site: Site, slots: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The place of each token ``[T]`` in blocks of the target's size.

    Padding tokens, whose slots are negative, land in slot 0 of block 0.
    """
    size = site.target.block_size
    slots = site.traced.call(_aten.clamp.default, slots, 0)
    block = site.traced.call(_aten.div.Tensor_mode, slots, size, rounding_mode="floor")
    return block, site.traced.call(_aten.remainder.Scalar, slots, size)


def write_rows(site: Site, cache: fx.Node, places: fx.Node, rows: fx.Node, remedy: str = "") -> None:
    """Write ``rows`` into ``cache`` at ``places``, ``[..., dims of the cache that they name]``.

    Raises:
        UnsupportedModel: no operator does; the message ends with ``remedy``, or with one that is known.
    """
    if site.call(_npu.npu_scatter_nd_update_.default, cache, places, rows) is not None:
        return
    if not remedy and value(cache).dtype is torch.bfloat16:
        remedy = "give dtype='float16'"
    what = f"no operator of {site.target.soc} writes the KV cache of {site.node.name}: {site.refused[-1][1]}"
    raise UnsupportedModel(f"{what}; {remedy}" if remedy else what)
