"""Numbers of tokens at which to run subgraphs that do not depend on the tokens."""

from __future__ import annotations

import math

from torch import fx

from .evaluate import Evaluation, at_sizes
from .fx_nodes import closure, is_tensor, shape
from .table_cut import SIZES, TableCut
from .token_dims import token_dims
from .traced import TracedGraph

_UNKNOWN_LONGEST = 4096
_MOST_ELEMENTS = 1 << 24


def longest_size(traced: TracedGraph, node: fx.Node) -> int:
    """The largest number of tokens that ``node`` can be run for: all positions of the model, as far as the tables
    that it cuts reach, and fewer where that would take more than 2^24 elements."""
    needed = [n for n in closure(node, Evaluation(traced, {}).reads) if is_tensor(n)]
    tokens = traced.max_positions or _UNKNOWN_LONGEST
    for cut in (TableCut.of(traced, n) for n in needed):
        tokens = min(tokens, len(cut.rows) - cut.offset) if cut else tokens

    def elements(tokens: int) -> int:
        sizes = {traced.token_symbol: tokens}
        return sum(math.prod(at_sizes(shape(n), sizes)) for n in needed if token_dims(traced, n))

    while tokens > SIZES[-1] and elements(tokens) > _MOST_ELEMENTS:
        tokens //= 2
    return max(tokens, SIZES[-1])
