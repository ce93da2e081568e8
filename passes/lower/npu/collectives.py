"""Collectives of several ranks for Ascend.

Matches:
    pagoda::all_reduce(x, group)
    pagoda::all_gather(x, size, group)
Becomes:
    wait_tensor(_c10d_functional.all_reduce(x, "sum", group))
    the blocks of wait_tensor(_c10d_functional.all_gather_into_tensor(x, size, group)) beside each other
Why:
    HCCL runs these, and torchair converts them to HcomAllReduce and HcomAllGather.

Level 0.
"""

from __future__ import annotations

import torch

# Imported for the shapes of what the operators yield.
import torch.distributed._functional_collectives
from torch import fx

from ....runtime.ops.collectives import beside_each_other
from ...graph.record import PassRecord
from ...graph.traced import TracedGraph
from .site import Site, lower_each

_aten, _c10d, _pagoda = torch.ops.aten, torch.ops._c10d_functional, torch.ops.pagoda


def lower_npu_collectives(traced: TracedGraph) -> PassRecord:
    """Lower what the ranks of a group exchange."""
    lowerings = {_pagoda.all_reduce.default: _all_reduce, _pagoda.all_gather.default: _all_gather}
    return lower_each(traced, "lower_npu_collectives", lowerings)


def _all_reduce(site: Site, x: fx.Node, group: str) -> fx.Node:
    summed = site.aten(_c10d.all_reduce.default, site.dense(x), "sum", group)
    return site.aten(_c10d.wait_tensor.default, summed)


def _all_gather(site: Site, x: fx.Node, size: int, group: str) -> fx.Node:
    gathered = site.aten(_c10d.all_gather_into_tensor.default, site.dense(x), size, group)
    blocks = site.aten(_c10d.wait_tensor.default, gathered)
    return site.inline(beside_each_other, blocks, size)  # type: ignore[no-any-return]
