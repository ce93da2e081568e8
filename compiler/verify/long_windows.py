"""The check of windows, chunks and choices of keys longer than the self-check's sequences, on copies of the graphs
with shorter ones.

Where the graphs run on the host, they are compared in float32 (``graph_check``). A device runs them in the model's
own dtype, whose rounding may hide a key more or less. So there the rewritten graph is held against the original with
the same window, and with windows that are a token shorter, a token longer, and without end: in the rows in which
these differ it has to be nearest to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import fx

from ...passes import TracedGraph
from ...passes.graph.attention_node import paged_attention_nodes
from ...passes.lower.npu.decode_graph import decode_graph
from ...runtime.npu_target import Product
from ...runtime.ops.attention.lightning_indexer import lightning_indexer
from ...runtime.phases import phase
from ..link.linkage import Linkage
from ..report import Verdict
from ..tolerance import chooses_keys, routes_tokens, row_errors, typical
from .graph_check import can_check, check_graph, own_logits, own_steps
from .self_check import Reference, Schedule

Lower: TypeAlias = Callable[[TracedGraph], object]
"""Lowers a graph in place."""

_SHORT = 8
_OTHERS = {"a token shorter": _SHORT - 1, "a token longer": _SHORT + 1, "without end": 1 << 12}
_SCHEDULE = Schedule((150, 29, 60), (70, 3, 33), 32, decoded=16)
"""Longer than a block of an NPU's cache, and enough decoded tokens to tell windows apart by."""
_COLUMNS = 4096
"""Of the logits, so many are compared at most: there are several of each row."""
_MOST_NEARER = 0.75
"""Share of the rows that may be nearer to another window: about half are where rounding hides the difference."""


@phase("verify")
def check_long_windows(
    original: TracedGraph, paged: TracedGraph, reference: Reference, lower: Lower | None = None
) -> Verdict | None:
    """Shorten every window, chunk and choice of keys that was too long to run, in the model's own masks and in the
    rewritten attention alike, and compare the two.

    Args:
        original: the graph before any pass.
        paged: the paged graph, its attention not lowered yet.
        reference: whose tolerance is that of the model's dtype.
        lower: lowers what was shortened, in place; None where that changes nothing.

    Returns:
        the verdict; None when no window is that long, where caches are rounded, for there it was given before, and
        where an indexer chooses keys on a device: half precision chooses others that are nearly as good.
    """
    literals = paged.notes.followed_literals
    if not literals or any(spec.has_scales for spec in paged.caches):
        return None
    short = _shortened(paged, _SHORT, lower)
    if can_check(short):
        return check_graph(_shortened_masks(original, literals, _SHORT), short)
    if chooses_keys(paged.graph):
        return None
    tokens, columns = _tokens(short), _columns(short)
    by_window = []
    for window in (_SHORT, *_OTHERS.values()):
        whole = own_logits(_shortened_masks(original, literals, window), tokens)
        by_window.append([rows[:, columns].clone() for rows in whole])
    stacked = [torch.stack(alike, 1) for alike in zip(*by_window, strict=True)]
    windows = _Windows()
    for _, logits, expected in own_steps(short, _reference(reference, tokens, stacked)):
        windows.add(logits[:, columns], list(expected.unbind(1)))
    return windows.verdict(replace(reference, share=0.5) if routes_tokens(short.graph) else reference)


@phase("verify")
def check_decoded_windows(paged: TracedGraph, reference: Reference, lower: Lower) -> Verdict | None:
    """Likewise compare decode steps by an attention kernel of their own, over int8 caches or on the inference chip,
    with those by the formula, which rounds what it caches alike.

    Returns:
        the verdict; None when no window is that long, or where no decode step has the kernel.
    """
    of_chip = paged.npu is not None and paged.npu.product is Product.INFERENCE
    if not paged.notes.followed_literals or not (of_chip or any(spec.has_scales for spec in paged.caches)):
        return None
    short = _shortened(paged, _SHORT, lower)
    decode = decode_graph(short)
    if decode is None:
        return None
    tokens, columns = _tokens(short), _columns(short)
    given = _reference(reference, tokens, [torch.zeros(len(sequence), 1) for sequence in tokens])
    formulas = [short, *(_shortened(paged, window, lower) for window in _OTHERS.values())]
    windows = _Windows()
    runs = own_steps(short, given, decode), *(own_steps(formula, given) for formula in formulas)
    for found, *by_window in zip(*runs, strict=True):
        windows.add(found[1][:, columns], [logits[:, columns] for _, logits, _ in by_window])
    return windows.verdict(reference)


class _Windows:
    """Errors of rows against those of the right window and of others."""

    def __init__(self) -> None:
        self._right: list[float] = []
        self._nearer: dict[str, list[bool]] = {name: [] for name in _OTHERS}

    def add(self, found: torch.Tensor, by_window: Sequence[torch.Tensor]) -> None:
        """Rows ``[R, n]``, and the same by the right window and by those of ``_OTHERS``."""
        right, *others = by_window
        errors = row_errors(found, right)
        self._right += errors.tolist()
        for nearer, other in zip(self._nearer.values(), others, strict=True):
            differs = (other != right).any(-1)
            nearer += (row_errors(found, other) < errors)[differs].tolist()

    def verdict(self, reference: Reference) -> Verdict:
        """The verdict of all rows."""
        error, limit = typical(self._right, reference.share), reference.tolerance
        reason = f"logits differ from the model's by {error:.3g} standard deviations (limit {limit:.3g})"
        reason = "" if error <= limit else reason
        for name, nearer in self._nearer.items():
            if not reason and not nearer:
                reason = f"no row distinguishes the window from one {name}"
            if not reason and sum(nearer) > _MOST_NEARER * len(nearer):
                reason = f"{sum(nearer)} of {len(nearer)} rows are those of a window {name}"
        return Verdict(not reason, max(self._right), limit, len(self._right), reason)


def _tokens(traced: TracedGraph) -> list[torch.Tensor]:
    schedule = _SCHEDULE.within(traced.max_positions or 1 << 30)
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, Linkage.of(traced).vocab_size, (n,), generator=generator) for n in schedule.lengths]


def _columns(traced: TracedGraph) -> slice:
    return slice(None, None, -(-Linkage.of(traced).vocab_size // _COLUMNS))


def _reference(reference: Reference, tokens: list[torch.Tensor], logits: list[torch.Tensor]) -> Reference:
    schedule = replace(_SCHEDULE, lengths=tuple(map(len, tokens)))
    return replace(reference, tokens=tokens, logits=logits, schedule=schedule)


def _shortened_masks(original: TracedGraph, literals: dict[int, set[str]], window: int) -> TracedGraph:
    """A copy of the graph before any pass, its masks made of ``window``."""
    short = original.copy()
    for literal, names in literals.items():
        for node in short.graph.nodes:
            if node.name in names:
                node.args = _swap(node.args, literal, window)
                node.kwargs = _swap(node.kwargs, literal, window)
    return short


def _shortened(paged: TracedGraph, to: int, lower: Lower | None) -> TracedGraph:
    """A copy of the paged graph whose attention looks back over ``to`` tokens, lowered."""
    short = paged.copy()
    for literal in paged.notes.followed_literals:
        for node in paged_attention_nodes(short):
            window, chunk = cast("tuple[int, int]", node.args[12:14])
            if abs(window - literal) <= 1:
                window += to - literal
            if chunk == literal:
                chunk = to
            node.args = (*node.args[:12], window, chunk, *node.args[14:])
        for node in short.graph.nodes:
            if node.target is lightning_indexer and node.args[3] == literal:
                node.args = (*node.args[:3], to, *node.args[4:])
                short.propagate(node)  # it has fewer columns, which lowering looks at
    if lower is not None:
        lower(short)
    return short


def _swap(arguments: Any, literal: int, window: int) -> Any:
    def one(x: Any) -> Any:
        if type(x) in (int, float) and abs(x) == literal:
            return type(x)(window if x > 0 else -window)
        return x

    return fx.node.map_aggregate(arguments, one)
