"""Drafts the tokens that a grammar forces, such as the names of a schema's fields."""

from __future__ import annotations

from collections.abc import Sequence

from ..requests.request import Request


class ForcedTokens:
    """Proposes the only text that the grammar of a request allows next, in the tokens that spell it.

    A mask may allow other tokens that spell the same text, so these are drafts like any others.
    """

    name = "forced"
    expected = 0.9

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the first ``most`` tokens of that text."""
        return () if request.grammar is None else request.grammar.forced_tokens(most)

    def settled(self, request: Request, tokens: Sequence[int]) -> None:
        """Do nothing: the grammar knows the tokens."""

    def finished(self, request: Request) -> None:
        """Do nothing."""
