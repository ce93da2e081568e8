"""Recognize short causal convolutions along the tokens that a model's own code spells out.

Matches:
    conv1d(pad(x, (K - 1, 0)), W, b, groups=g)                # [1, C, T]; stride and dilation 1, K <= 8
    conv1d(conv1d(pad(x, (K + L - 2, 0)), W, b), V, c)        # and longer chains: K and L taps
    conv1d(x, W, b, padding=K - 1, groups=g)[..., :T]
Becomes:
    pagoda::causal_conv1d_seq(x.T, W, b).T                    # one channel to a group, zeros in front
    (groups of matmul(taps, W) + b).T                         # else; taps are rows of the tokens before
Why it is faster:
    in a flat step the rows in front are another sequence's or an earlier step's: they are kept in a state, and a
    step computes the convolution of its own tokens alone.

Behind the first convolution of a chain what stands in front of a sequence is no longer zero but what convolutions
make of zeros; its first tokens get that. Level 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...runtime.ops.state.causal_conv1d import causal_conv1d_seq
from ..graph.fx_nodes import METADATA_CALLS, argument, callee, is_dynamic, is_tensor, shape, value
from ..graph.record import NoMatch, PassRecord
from ..graph.rewrite_each import rewrite_each
from ..graph.token_delay import MOST_TAPS, insert_delayed, same_numbers
from ..graph.token_dims import token_dims
from ..graph.traced import TracedGraph


@dataclass(frozen=True)
class _Convolution:
    """A call of conv1d.

    Attributes:
        weight: ``[C', C / groups, taps]``.
        bias: ``[C']``, or None.
        padding: rows in front and behind.
        groups: of channels.
    """

    weight: fx.Node
    bias: fx.Node | None
    padding: int
    groups: int

    @classmethod
    def of(cls, node: fx.Node) -> _Convolution:
        weight, bias = (argument(node, i, name) for i, name in ((1, "weight"), (2, "bias")))
        stride, padding, dilation = (
            _single(argument(node, i, name, default))
            for i, name, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
        )
        if stride != 1 or dilation != 1 or not isinstance(padding, int):
            raise NoMatch(f"a convolution with stride {stride}, padding {padding}, dilation {dilation}")
        if any(map(is_dynamic, shape(weight))) or not 1 <= shape(weight)[2] <= MOST_TAPS:
            raise NoMatch(f"a convolution over {shape(weight)[2]} tokens; states are kept for up to {MOST_TAPS}")
        return cls(weight, bias, padding, argument(node, 6, "groups", 1))

    @property
    def taps(self) -> int:
        return int(shape(self.weight)[2])

    @property
    def is_depthwise(self) -> bool:
        """One channel to a group, in and out."""
        return int(shape(self.weight)[0]) == self.groups and int(shape(self.weight)[1]) == 1


def recognize_short_conv(traced: TracedGraph) -> PassRecord:
    """Replace every causal convolution along the tokens by operators that go on from a state.

    Flat (paged) graphs only.
    """

    def step(node: fx.Node) -> str | None:
        if callee(node) != "conv1d" or len(shape(node)) != 3 or 2 not in token_dims(traced, node):
            return None
        if any(callee(user) == "conv1d" for user in node.users):
            return None  # looked at from the last of the chain
        source, chain = _chain(node)
        rows, results = _ends(traced, source, chain, node)
        for result in results:
            with traced.before(result, like=node):
                new = _insert(traced, rows, chain)
            given = [rows, *(n for c in chain for n in (c.weight, c.bias) if n is not None)]
            if not same_numbers(traced, result, new, given):
                raise NoMatch("its results are not those of a causal convolution")
            traced.substitute(result, new)
        return ""

    return rewrite_each(traced, "recognize_short_conv", step, list(traced.graph.nodes) if traced.paged else ())


def _single(size: Any) -> Any:
    return size[0] if isinstance(size, (list, tuple)) and len(size) == 1 else size


def _chain(last: fx.Node) -> tuple[fx.Node, list[_Convolution]]:
    """What the first of convolutions behind one another reads, and these."""
    chain = [_Convolution.of(last)]
    source: Any = argument(last, 0, "input")
    while callee(source) == "conv1d":
        chain.insert(0, _Convolution.of(source))
        source = argument(source, 0, "input")
    return source, chain


def _ends(
    traced: TracedGraph, source: fx.Node, chain: list[_Convolution], last: fx.Node
) -> tuple[fx.Node, list[fx.Node]]:
    """The ``[1, C, T]`` node that is convolved, and the nodes that are the ``[1, C', T]`` result."""
    before = sum(c.taps - 1 for c in chain)
    tokens = traced.token_symbol
    if callee(source) == "pad" and not any(c.padding for c in chain):
        pads, mode, filling = (argument(source, i, n) for i, n in ((1, "pad"), (2, "mode"), (3, "value")))
        if list(pads) != [before, 0] or mode not in (None, "constant") or filling:
            raise NoMatch(f"pad{tuple(pads)} in front of convolutions that reach back {before} tokens")
        found, results = source.args[0], [last]
    elif len(chain) == 1 and chain[0].padding == before:
        found, results = source, [user for user in last.users if callee(user) not in METADATA_CALLS]
        if not all(callee(user) in ("getitem", "narrow", "slice") for user in results):
            raise NoMatch("the convolution is not cut to the number of tokens")
    else:
        raise NoMatch(f"nothing but padding by {before} in front makes convolutions causal")
    for node in (found, *results):
        if not is_tensor(node) or len(shape(node)) != 3 or str(shape(node)[2]) != str(tokens) or shape(node)[0] != 1:
            raise NoMatch(f"{tuple(shape(node))} is not [1, C, {tokens}]")
    return found, results  # type: ignore[return-value]


def _insert(traced: TracedGraph, source: fx.Node, chain: list[_Convolution]) -> fx.Node:
    rows = traced.method("transpose", source, 1, 2)
    front: fx.Node | None = None  # what the rows are in front of a sequence; None: zeros
    for i, convolution in enumerate(chain):
        if convolution.is_depthwise and front is None and convolution.taps > 1:
            weight = traced.method("squeeze", convolution.weight, 1)
            new = traced.call(causal_conv1d_seq, rows, weight, convolution.bias, "")
        else:
            new = _grouped(traced, rows, front, convolution)
        if i + 1 < len(chain):
            front = _of_front(traced, front, convolution)
        rows = new
    return traced.method("transpose", rows, 1, 2)


def _grouped(traced: TracedGraph, rows: fx.Node, front: fx.Node | None, convolution: _Convolution) -> fx.Node:
    """Each group's rows of all taps times its part of the weight."""
    outputs, channels, taps = map(int, shape(convolution.weight))
    groups, tokens = convolution.groups, value(rows).shape[1]
    delayed = [insert_delayed(traced, rows, by, front) for by in range(taps - 1, 0, -1)]
    joined = traced.call(torch.stack, [*delayed, rows], -1)  # [1, T, groups · channels, taps]
    size = traced.method("size", rows, 1)
    grouped = traced.method("reshape", joined, size, groups, channels * taps)
    weight = traced.method("reshape", convolution.weight, groups, outputs // groups, channels * taps)
    product = traced.call(
        torch.matmul, traced.method("transpose", grouped, 0, 1), traced.method("transpose", weight, 1, 2)
    )
    result = traced.method("reshape", traced.method("transpose", product, 0, 1), 1, size, outputs)
    assert str(value(result).shape[1]) == str(tokens)
    return result if convolution.bias is None else traced.call(torch.add, result, convolution.bias)


def _of_front(traced: TracedGraph, front: fx.Node | None, convolution: _Convolution) -> fx.Node | None:
    """What a convolution makes of rows in front of which there are only such rows: ``[1, 1, C']``."""
    if front is None:
        return convolution.bias  # [C'] is broadcast
    alike = traced.method("expand", traced.method("reshape", front, 1, -1, 1), -1, -1, convolution.taps)
    made = traced.call(torch.conv1d, alike, convolution.weight, convolution.bias, 1, 0, 1, convolution.groups)
    return traced.method("transpose", made, 1, 2)
