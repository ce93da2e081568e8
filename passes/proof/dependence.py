"""What each node of a flat graph depends on: sizes only, positions, routing decisions, or the tokens themselves."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import fx

from ...runtime.step_metadata import PREVIOUS_HIDDEN
from ..graph.evaluate import is_size
from ..graph.fx_nodes import METADATA_CALLS, callee, mutated_arguments, step_field, storage_key, value
from ..graph.traced import TracedGraph


class Depends(IntEnum):
    """From the weakest dependence to the strongest; a node has the strongest of its inputs."""

    CONSTANT = 0
    POSITION = 1
    ROUTING = 2  # indices that a router chose (top-k, sort, argmax and what is counted from them)
    TOKENS = 3


_CHOICES = frozenset("argmax argmin argsort nonzero multinomial bucketize searchsorted".split())
_PER_TOKEN_FIELDS = ("slot_mapping", "token_lengths")


def dependences(traced: TracedGraph) -> dict[fx.Node, Depends]:
    """The dependence of every node, in-place writes included."""
    found: dict[fx.Node, Depends] = {}
    written: dict[int, Depends] = {}
    for node in traced.graph.nodes:
        found[node] = _of(traced, node, found, written)
        for target in mutated_arguments(node):
            if (key := storage_key(target)) is not None:
                written[key] = max(written.get(key, Depends.CONSTANT), found[node])
    return found


def _of(traced: TracedGraph, node: fx.Node, found: dict[fx.Node, Depends], written: dict[int, Depends]) -> Depends:
    if node.op == "placeholder":
        if node.name == traced.input_ids or step_field(node) == PREVIOUS_HIDDEN:
            return Depends.TOKENS
        if node.name == traced.position_ids or step_field(node) in _PER_TOKEN_FIELDS:
            return Depends.POSITION
        return Depends.CONSTANT
    if node.op == "get_attr" or is_size(node):
        return Depends.CONSTANT
    inputs = list(node.all_input_nodes)
    if callee(node) in METADATA_CALLS:
        inputs = inputs[1:]
    strongest = max((found[n] for n in inputs), default=Depends.CONSTANT)
    for holder in (node, *inputs):  # what an input holds by now, not what it held when it was made
        if (key := storage_key(holder)) is not None:
            strongest = max(strongest, written.get(key, Depends.CONSTANT))
    if strongest == Depends.TOKENS and _is_choice(node):
        return Depends.ROUTING
    return strongest


def _is_choice(node: fx.Node) -> bool:
    if callee(node) in _CHOICES:
        return True
    if callee(node) == "getitem" and callee(node.args[0]) in ("topk", "sort", "max", "min"):
        return bool(node.args[1] == 1)
    if callee(node) in ("getattr",) and callee(node.args[0]) in ("topk", "sort", "max", "min"):
        return bool(node.args[1] == "indices")
    # A router's comparison of its scores; a comparison of token ids (padding, separators) is not a choice.
    v = value(node)
    compared = [value(n) for n in node.all_input_nodes]
    floats = all(t.is_floating_point() for t in compared if isinstance(t, torch.Tensor))
    return isinstance(v, torch.Tensor) and v.dtype is torch.bool and floats
