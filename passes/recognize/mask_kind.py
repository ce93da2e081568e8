"""Classifies a mask by its values: causal, sliding window, chunked, with or without ALiBi."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..graph.evaluate import DependsOnData, Evaluation, TooLarge
from ..graph.fx_nodes import value
from ..graph.limits import HIDDEN, Limits, find_limits
from ..graph.traced import TracedGraph

PROBE_BYTES = 64 << 20
_FEWEST_TOKENS = 40
_APART = 5
"""Between the numbers that stand for larger ones."""


class UnknownMask(ValueError):
    """A mask that is none of the kinds that the runtime can apply."""


@dataclass(frozen=True)
class MaskKind:
    """The keys j that a query i sees, on top of j <= i.

    Attributes:
        sliding_window: ``i - j < sliding_window``; 0 when unlimited.
        chunk: ``i // chunk == j // chunk``; 0 when unlimited.
        alibi_slopes: ``[heads]`` float32, the score gets ``slope * (j - i)``; None without ALiBi.
        literal: the constant in the graph that ``sliding_window`` or ``chunk`` was followed from when it was too
            large to run; 0 when the mask was run as it is.
    """

    sliding_window: int = 0
    chunk: int = 0
    alibi_slopes: torch.Tensor | None = None
    literal: int = 0


def classify(mask: torch.Tensor, heads: int) -> MaskKind:
    """Classify a mask that was computed for positions 0..T-1.

    Args:
        mask: broadcastable to ``[1, heads, T, T]``; bool (True = seen) or added to the scores.
        heads: query heads.

    Raises:
        UnknownMask: it is none of the kinds, e.g. bidirectional, different per head, or a learned bias.
    """
    tokens = mask.shape[-1]
    if mask.dim() == 1:
        mask = mask[None]
    mask = mask.expand(*mask.shape[:-2], tokens, tokens)
    mask = mask.reshape(-1, tokens, tokens)
    slopes = None
    if mask.dtype != torch.bool:
        seen = mask > HIDDEN
        slopes = _alibi(mask, seen, heads)
        mask = seen
    if not bool((mask == mask[:1]).all()):
        raise UnknownMask("the mask differs between heads")
    seen = mask[0]
    i = torch.arange(tokens)[:, None]
    j = torch.arange(tokens)[None]
    causal = j <= i
    if bool((seen & ~causal).any()):
        raise UnknownMask("tokens see later tokens (bidirectional or prefix attention)")
    if torch.equal(seen, causal):
        return MaskKind(alibi_slopes=slopes)
    window = int(seen[-1].sum())
    if torch.equal(seen, causal & (i - j < window)):
        return MaskKind(sliding_window=window, alibi_slopes=slopes)
    first = int((~seen[:, 0]).nonzero()[0]) if bool((~seen[:, 0]).any()) else 0
    if first and torch.equal(seen, causal & (i // first == j // first)):
        return MaskKind(chunk=first, alibi_slopes=slopes)
    raise UnknownMask("the mask is neither causal, nor a sliding window, nor chunked")


def _alibi(mask: torch.Tensor, seen: torch.Tensor, heads: int) -> torch.Tensor | None:
    """Slopes of a bias that is ``slope * j`` plus anything constant per query (softmax ignores that part)."""
    bias = torch.where(seen, mask, torch.zeros_like(mask)).float()
    if not bool(bias.any()):
        return None
    tokens = mask.shape[-1]
    last = bias[:, -1]
    pairs = (last[:, 1:] - last[:, :-1])[seen[:, -1, 1:] & seen[:, -1, :-1]].reshape(bias.shape[0], -1)
    magnitude = last.abs()
    at = 0 if float(magnitude[:, :2].sum()) <= float(magnitude[:, -2:].sum()) else pairs.shape[1] - 1
    slopes = pairs[:, at]  # where the bias is smallest its low-precision rounding is exact
    relative = bias - torch.diagonal(bias, dim1=1, dim2=2)[:, :, None]
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    expected = slopes[:, None, None] * distance
    largest = float(expected.abs().max())
    tolerance = 4 * float(torch.finfo(mask.dtype).eps) * max(1.0, largest) + 1e-6
    if bool(((relative - expected).abs() > tolerance)[seen].any()):
        raise UnknownMask("a bias is added to the scores that is not an ALiBi")
    if slopes.numel() == 1:
        slopes = slopes.expand(heads)
    if slopes.numel() != heads:
        raise UnknownMask(f"ALiBi slopes for {slopes.numel()} of {heads} heads")
    return slopes.clone()


def probe(traced: TracedGraph, node: fx.Node, heads: int) -> MaskKind:
    """Classify the mask that ``node`` computes, by running it on a few tokens.

    Literals above ``SMALL_CONSTANT`` (a window of 4096) are not run at their size: the mask is run twice with smaller
    numbers instead of each, and the edge has to move with them. Then smaller numbers replace all of them at once: of
    two limits that are joined by ``or`` neither moves an edge alone. Other numbers, which sizes and stored tensors
    hold, are run at their size.

    Raises:
        UnknownMask: it depends on the tokens, or fits no kind.
    """
    if not isinstance(value(node), torch.Tensor) or value(node).dtype == torch.int64:
        raise UnknownMask("the mask is not a bool or float tensor")
    try:
        limits = find_limits(traced, Evaluation(traced, {}).needed(node))
    except DependsOnData as reason:
        raise UnknownMask(f"the mask depends on the tokens ({reason})") from None
    mask = _Mask(traced, node, heads, limits)
    large = [x for x in limits.large if mask.takes_others_for(x)]
    reach = traced.max_positions or math.inf
    sizes = [x for x in limits.large if x not in large and x < reach and not mask.is_length(x, limits.large)]
    beyond = max([*limits.small, limits.fixed, *sizes], default=0)
    if limits.in_blocks and len(limits.small) > 1:
        beyond *= limits.small[-2]
    tokens = max(_FEWEST_TOKENS, 2 * math.ceil(beyond) + 3, limits.table)
    if traced.max_positions is not None:
        tokens = min(tokens, traced.max_positions)
    kind = mask.run(tokens, {})
    for literal in large:
        kind = mask.follow(literal, kind)
    mask.compare_all(large, kind)
    return kind


class _OtherShape(UnknownMask):
    """A mask that is not one of all tokens."""


@dataclass(frozen=True)
class _Mask:
    """A mask that can be run.

    Attributes:
        traced: the graph.
        node: of the mask.
        heads: query heads.
        limits: the numbers that it may change at.
    """

    traced: TracedGraph
    node: fx.Node
    heads: int
    limits: Limits

    def run(self, tokens: int, others: Mapping[float, int]) -> MaskKind:
        """Classify the mask of ``tokens`` tokens, with other numbers instead of literals.

        Raises:
            UnknownMask: it has none, or is too large.
            RuntimeError: or another error of torch: it cannot be computed so.
        """
        if tokens * tokens * max(4, value(self.node).element_size()) > PROBE_BYTES:
            raise UnknownMask(f"the mask would have to be run at {tokens} tokens to be sure of it")
        substitute = {sign * literal: sign * other for literal, other in others.items() for sign in (1, -1)}
        try:
            mask = Evaluation(self.traced, {self.traced.token_symbol: tokens}, substitute=substitute)(self.node)
        except TooLarge as reason:
            raise UnknownMask(f"the mask cannot be run at {tokens} tokens: {reason}") from None
        if mask.shape[-1] != tokens or mask.dim() > 4:
            raise _OtherShape(f"the mask has shape {tuple(mask.shape)} for {tokens} tokens")
        return classify(mask, self.heads)

    def takes_others_for(self, literal: float) -> bool:
        """True if the mask can be built with another number instead of a literal; otherwise the literal is a size."""
        for other in self._stand_ins(2):
            try:
                self._run_with({literal: other})
            except _OtherShape:
                return False
            except UnknownMask:
                pass
            except (RuntimeError, IndexError, ValueError):
                return False
        return True

    def is_length(self, literal: float, literals: Iterable[float]) -> bool:
        """True if the mask can be built for at most as many tokens as a literal says.

        The literal is then the length of a table; as a limit it would never take effect.

        Args:
            literal: that does not take another number alone.
            literals: all large ones; those that are nearly the same are other names for the length.
        """
        length = self._tokens_for(self._stand_ins(1)[0]) + _APART
        others = {x: length + round(x - literal) for x in literals if abs(x - literal) <= 2}
        try:
            self.run(length - _APART, others)
        except (RuntimeError, IndexError, ValueError):
            return False
        try:
            self.run(length + _APART, others)
        except _OtherShape:
            return True
        except UnknownMask:
            return False
        except (RuntimeError, IndexError, ValueError):
            return True
        return False

    def follow(self, literal: float, kind: MaskKind) -> MaskKind:
        """``kind``, with the limit that a literal sets which is too large to run."""
        numbers = self._stand_ins(2)
        first, second = (self._run_with({literal: number}) for number in numbers)
        windows, chunks = (first.sliding_window, second.sliding_window), (first.chunk, second.chunk)
        moves = [limits for limits in (windows, chunks) if all(limits) and limits[0] != limits[1]]
        if not moves:
            return kind
        what = "window" if moves[0] is windows else "chunk"
        if other := kind.sliding_window or kind.chunk:
            raise UnknownMask(f"the mask has limits of {other} and of {literal:g}, and one can be applied")
        offsets = {limit - number for limit, number in zip(moves[0], numbers, strict=True)}
        if len(offsets) != 1 or (what == "chunk" and offsets != {0}):
            raise UnknownMask(f"the {what} does not follow the constant {literal:g}")
        if literal != int(literal):
            raise UnknownMask(f"its {what} of {literal:g} is not an integer")
        whole = int(literal)
        if what == "chunk":
            return replace(kind, chunk=whole, literal=whole)
        return replace(kind, sliding_window=whole + offsets.pop(), literal=whole)

    def compare_all(self, literals: list[float], kind: MaskKind) -> None:
        """Raise ``UnknownMask`` unless the mask is of that kind when other numbers, in the same order, replace all
        ``literals`` at once."""
        others = dict(zip(literals, self._stand_ins(len(literals)), strict=True))
        if not others:
            return
        moved = others[kind.literal] - kind.literal if kind.literal else 0
        expected = replace(
            kind,
            sliding_window=kind.sliding_window and kind.sliding_window + moved,
            chunk=kind.chunk and kind.chunk + moved,
            literal=0,
        )
        listed = " and ".join(f"{x:g}" for x in literals)
        try:
            found = self._run_with(others)
        except UnknownMask as reason:
            raise UnknownMask(f"{reason} (its limits are among {listed})") from None
        except (RuntimeError, IndexError, ValueError) as error:
            raise UnknownMask(f"the mask cannot be run with others in place of {listed}: {error}") from None
        if not _alike(found, expected):
            raise UnknownMask(f"{listed} make limits together that none of them makes alone")

    def _run_with(self, others: Mapping[float, int]) -> MaskKind:
        return self.run(self._tokens_for(max(others.values())), others)

    def _tokens_for(self, stand_in: int) -> int:
        """More than enough to see an edge at ``stand_in``, and all places of tables."""
        block = math.ceil(max(self.limits.small, default=1)) if self.limits.in_blocks else 1
        return max(_FEWEST_TOKENS, 2 * stand_in * block + 16, self.limits.table)

    def _stand_ins(self, count: int) -> list[int]:
        """Numbers that are larger than those which are run at their size."""
        largest = math.ceil(max([2, *self.limits.small, self.limits.fixed]))
        return [largest + _APART * i for i in range(1, count + 1)]


def _alike(a: MaskKind, b: MaskKind) -> bool:
    if (a.sliding_window, a.chunk) != (b.sliding_window, b.chunk):
        return False
    if a.alibi_slopes is None or b.alibi_slopes is None:
        return a.alibi_slopes is b.alibi_slopes
    return bool(torch.allclose(a.alibi_slopes, b.alibi_slopes, rtol=0.02))  # they may come of rounded biases
