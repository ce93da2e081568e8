"""Recognise layer norms.

Matches:
    native_layer_norm(x, [D], weight, bias, eps)[0]
    (x - mean(x, -1)) * rsqrt(mean((x - mean(x, -1)) ** 2, -1) + eps) * weight      # Cohere's, in float32
Becomes:
    pagoda::layer_norm(x, weight, bias, eps)
Why it is faster:
    the written-out form takes three passes over the row; and residual additions fuse with it.

Level 2. Source of the operator: Ba, Kiros and Hinton, Layer Normalization, 2016.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph.fx_nodes import callee, eliminate_dead_code, module_path, value
from ..graph.record import PassRecord, Rejection
from ..graph.traced import TracedGraph
from .norm_region import HALF, NoNorm, cast_source, follow_scale, mean_over_last, product_with, root_of_mean_square

NAME = "recognise_layer_norm"

LAYER_NORM = torch.ops.pagoda.layer_norm.default


def recognise_layer_norm(traced: TracedGraph) -> PassRecord:
    """Replace every layer norm over the last dim by ``pagoda::layer_norm``."""
    record = PassRecord(NAME)
    for node in list(traced.graph.nodes):
        try:
            if callee(node) == "native_layer_norm":
                _replace_native(traced, node)
            elif not _replace_written_out(traced, node):
                continue
            record.matches += 1
        except NoNorm as why:
            record.rejections.append(Rejection(node.name, str(why), module_path(node)))
    if record.matches:
        eliminate_dead_code(traced.graph)
    return record


def _replace_native(traced: TracedGraph, node: fx.Node) -> None:
    x, sizes, weight, bias, eps = node.args
    if len(sizes) != 1:  # type: ignore[arg-type]
        raise NoNorm(f"it normalises the last {len(sizes)} dims")  # type: ignore[arg-type]
    if any(user.args[1] != 0 for user in node.users):
        raise NoNorm("its statistics are read too")
    for parameter in (weight, bias):
        if parameter is not None and value(parameter).dtype not in (value(x).dtype, torch.float32):
            raise NoNorm(f"it takes {value(x).dtype} and a parameter of {value(parameter).dtype}")
    (output,) = node.users
    with traced.before(node):
        norm = traced.call(LAYER_NORM, x, weight, bias, eps)
    traced.substitute(output, norm)


def _replace_written_out(traced: TracedGraph, node: fx.Node) -> bool:
    root = root_of_mean_square(node)
    if root is None or not root.reciprocal or callee(root.squares) != "sub.Tensor":
        return False
    x, mean = root.squares.args[:2]
    if not isinstance(x, fx.Node) or mean_over_last(mean) is not x:
        return False
    if value(x).dtype in HALF:
        raise NoNorm(f"its statistics are taken in {value(x).dtype}")
    users = list(node.users)
    if len(users) != 1 or product_with(users[0], root) is not root.squares:
        raise NoNorm("the root of the variance goes elsewhere than into the centred input")
    entry = cast_source(x)
    found = follow_scale(users[0], value(entry).dtype)
    if found.round_before_scale:
        raise NoNorm("it is rounded before it is scaled")
    if found.weight_offset:
        raise NoNorm(f"its scale has an offset of {found.weight_offset}")
    with traced.before(found.output):
        norm = traced.call(LAYER_NORM, entry, found.weight, None, root.eps)
    traced.substitute(found.output, norm)
    return True
