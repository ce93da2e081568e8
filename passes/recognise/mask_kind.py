"""Say what a mask is by looking at it: causal, sliding window, chunked, with or without ALiBi."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from ..graph.evaluate import DependsOnData, Evaluation
from ..graph.fx_nodes import closure, shape, value
from ..graph.traced import TracedGraph

PROBE_BYTES = 64 << 20
SMALL_CONSTANT = 120
_HIDDEN = -1e4  # additive masks hide a key with a number below this one


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
        seen = mask > _HIDDEN
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
        raise UnknownMask("a bias is added to the scores that is no ALiBi")
    if slopes.numel() == 1:
        slopes = slopes.expand(heads)
    if slopes.numel() != heads:
        raise UnknownMask(f"ALiBi slopes for {slopes.numel()} of {heads} heads")
    return slopes.clone()


def probe(traced: TracedGraph, node: fx.Node, heads: int) -> MaskKind:
    """Classify the mask that ``node`` computes, by running it on a few tokens.

    Constants above ``SMALL_CONSTANT`` (a window of 4096) are not run at their size: the mask is run with smaller
    numbers in their place, twice, and the edge has to move with them.

    Raises:
        UnknownMask: it depends on the tokens, or fits no kind.
    """
    if not isinstance(value(node), torch.Tensor) or value(node).dtype == torch.int64:
        raise UnknownMask("the mask is no bool or float tensor")
    needed = closure(node, Evaluation(traced, {}).reads)
    constants = _integer_constants(needed)
    small = [c for c in constants if c <= SMALL_CONSTANT]
    large = sorted(c for c in constants if c > SMALL_CONSTANT)
    tokens = max(40, 2 * max(small, default=0) + 3, _table_size(needed))
    if traced.max_positions is not None:
        tokens = min(tokens, traced.max_positions)
    if tokens * tokens * max(4, value(node).element_size()) > PROBE_BYTES:
        raise UnknownMask(f"the mask would have to be run at {tokens} tokens to be sure of it")
    kind = _run(traced, node, tokens, {}, heads)
    for constant in large:
        kind = _follow(traced, node, constant, kind, heads)
    return kind


def _run(traced: TracedGraph, node: fx.Node, tokens: int, substitute: dict[int, int], heads: int) -> MaskKind:
    try:
        mask = Evaluation(traced, {traced.token_symbol: tokens}, substitute=substitute)(node)
    except DependsOnData as reason:
        raise UnknownMask(f"the mask depends on the tokens ({reason})") from None
    if mask.shape[-1] != tokens or mask.dim() > 4:
        raise UnknownMask(f"the mask has shape {tuple(mask.shape)} for {tokens} tokens")
    return classify(mask, heads)


def _follow(traced: TracedGraph, node: fx.Node, constant: int, kind: MaskKind, heads: int) -> MaskKind:
    """The effect on the mask of a constant that is too large to run."""
    small = []
    for number in (7, 12):
        try:
            small.append(_run(traced, node, 40, {constant: number, -constant: -number}, heads))
        except UnknownMask:
            raise
        except (RuntimeError, IndexError, ValueError):
            return kind  # a table's size rather than a window: the mask cannot even be built with another number
    offsets = {k.sliding_window - n for k, n in zip(small, (7, 12), strict=True) if k.sliding_window}
    if small[0].sliding_window and small[1].sliding_window and small[0].sliding_window != small[1].sliding_window:
        if len(offsets) != 1:
            raise UnknownMask(f"the window does not follow the constant {constant}")
        return replace(kind, sliding_window=constant + offsets.pop(), literal=constant)
    if small[0].chunk and small[1].chunk and small[0].chunk != small[1].chunk:
        if (small[0].chunk, small[1].chunk) != (7, 12):
            raise UnknownMask(f"the chunk does not follow the constant {constant}")
        return replace(kind, chunk=constant, literal=constant)
    return kind


def _integer_constants(nodes: list[fx.Node]) -> set[int]:
    found: set[int] = set()

    def note(x: object) -> None:
        if type(x) is int and abs(x) > 1 and abs(x) < 1 << 40:
            found.add(abs(x))

    for node in nodes:
        if isinstance(value(node), torch.Tensor):
            torch.utils._pytree.tree_map_(note, (node.args, node.kwargs))
    return found


def _table_size(nodes: list[fx.Node]) -> int:
    """Positions that a stored mask table covers: its window may be written in the table itself."""
    sizes = [
        int(shape(n)[-1])
        for n in nodes
        if n.op == "placeholder"
        and len(shape(n)) >= 2
        and isinstance(shape(n)[-1], int)
        and shape(n)[-1] == shape(n)[-2]
    ]
    return max(sizes, default=0)
