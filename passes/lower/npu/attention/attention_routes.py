"""In which layout the attention kernel moves the fewest bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Heads:
    """Shapes of one attention.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values.
        key_dim: of a query's or key's head.
        value_dim: of a value's head.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    def padded(self) -> Heads:
        """The same with heads filled up to the size that every token layout takes."""
        return replace(self, key_dim=_PADDED, value_dim=_PADDED)


_CONTEXT = 1024
"""Tokens that a decoding sequence looks back over, for the comparison of routes."""
_PADDED = 128


def bytes_per_decoded_token(heads: Heads, route: str, context: int = _CONTEXT, itemsize: int = 2) -> int:
    """Bytes that one decoded token of one sequence moves in one layer's attention.

    Args:
        heads: of the layer.
        route: "TND", "TND padded" (heads filled up to 128 dims, in the caches too) or "BSH" (queries and results
            copied into sequences padded to two tokens and back).
        context: tokens in the cache.
        itemsize: bytes of an element.

    Raises:
        ValueError: an unknown route.
    """
    key_dim, value_dim = heads.key_dim, heads.value_dim
    copies = 0
    if route == "TND padded":
        key_dim = value_dim = _PADDED
        # Queries, keys and values are filled up, results cut back: each read and written once more.
        copies = 2 * (heads.heads * 2 + heads.kv_heads * 2) * _PADDED
    elif route == "BSH":
        copies = 3 * heads.heads * (key_dim + value_dim)  # a row read and two written, or two made and one taken
    elif route != "TND":
        raise ValueError(f"route={route!r} is not one of 'TND', 'TND padded', 'BSH'")
    cached = context * heads.kv_heads * (key_dim + value_dim)
    return itemsize * (cached + heads.heads * (key_dim + value_dim) + copies)


def routes_by_traffic(heads: Heads, *, sinks: bool) -> list[str]:
    """Layouts to try, the one that moves the fewest bytes first. Sinks are known in token layouts only."""
    routes = ["TND"]
    if max(heads.key_dim, heads.value_dim) <= _PADDED:
        routes.append("TND padded")
    if not sinks:
        routes.append("BSH")
    return sorted(routes, key=lambda route: bytes_per_decoded_token(heads, route))
