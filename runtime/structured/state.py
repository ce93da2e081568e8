"""The place of one completion in its grammar: a function of the tokens that it has settled, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .grammar import Grammar
    from .vocabulary import Mask


class GrammarError(RuntimeError):
    """A grammar that cannot go on: a step took too much work, or a token does not belong to it."""


class GrammarState:
    """Follows one completion through a grammar.

    Args:
        grammar: whose state it is.
        after: as in ``AskedOutput``.
        stop_token_ids: that would end the completion.

    Attributes:
        grammar: whose state it is.
        is_waiting: the text that the grammar begins after has not come yet; any token may that ends
            nothing, for a completion that ended now would not have been held to the grammar.
        waiting_mask: of the tokens that may come while it waits; None where it never does.
        is_finished: the grammar allows nothing more.
        ended_in_text: it is finished, and the last token is a part of the text.
        error: why no mask could be made; None as long as one could.
    """

    __slots__ = (
        "_after",
        "_numbers",
        "_tail",
        "ended_in_text",
        "error",
        "grammar",
        "is_finished",
        "is_waiting",
        "matcher",
        "waiting_mask",
    )

    def __init__(
        self, grammar: Grammar, after: tuple[int, ...] | str | None = None, stop_token_ids: Sequence[int] = ()
    ) -> None:
        self.grammar = grammar
        self.waiting_mask: Mask | None = None
        if after is not None:
            self.waiting_mask = grammar.vocabulary.not_ending(stop_token_ids)
        self._after = after.encode() if isinstance(after, str) else after
        self._begin()

    def _begin(self) -> None:
        self.matcher = self.grammar.matcher()
        self._numbers = None if self.grammar.numbers is None else self.grammar.numbers()
        self._tail: bytes | tuple[int, ...] = b"" if isinstance(self._after, bytes) else ()
        self.is_waiting = self._after is not None
        self.is_finished = self.ended_in_text = False
        self.error: str | None = None

    @property
    def digits_left(self) -> int | None:
        """Most digits that the next token may begin with, None for any number; see ``NumberLengths``."""
        return None if self._numbers is None or self.is_waiting else self._numbers.digits_left

    def consume(self, token: int) -> bool:
        """Take the next token; returns whether the grammar is finished.

        Raises:
            GrammarError: it may not come here.
        """
        if self.is_waiting:
            self._wait(token)
            return False
        vocabulary = self.grammar.vocabulary
        if not self.matcher.consume_token(token):
            raise GrammarError(self.trouble())
        if self._numbers is not None:
            self._numbers.feed(vocabulary.token_bytes(token))
        if self.matcher.is_stopped():
            self.is_finished = True
            self.ended_in_text = token not in vocabulary.eos_token_ids
        return self.is_finished

    def restore(self, tokens: Sequence[int]) -> None:
        """Return to where the completion has these tokens, from wherever an interrupted call left this.

        Raises:
            GrammarError: as ``consume`` does.
        """
        self._begin()
        for token in tokens:
            self.consume(token)

    def trouble(self) -> str:
        """Why the matcher cannot go on."""
        reason = str(self.matcher.get_error()).partition("\n")[0][:200]
        return f"the grammar of structured_outputs cannot go on ({reason})"

    def _begin_with(self, text: bytes) -> None:
        """Take what the token that ended the wait holds of the constrained text; white space counts to the wait.

        Raises:
            GrammarError: it may not come here.
        """
        for token in self.grammar.vocabulary.tokens_of(text):
            self.consume(token)

    def _wait(self, token: int) -> None:
        if isinstance(self._after, bytes):
            tail = self._tail + self.grammar.vocabulary.token_bytes(token)  # type: ignore[operator]
            self.is_waiting = self._after not in tail
            self._tail = tail[-len(self._after) :]
            if not self.is_waiting:
                self._begin_with(tail.partition(self._after)[2].lstrip())
        else:
            ids = (*self._tail, token)[-len(self._after or ()) :]
            self.is_waiting, self._tail = ids != self._after, ids
