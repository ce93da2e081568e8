"""The state of one completion in its grammar: a function of its settled tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .asked import After
    from .grammar import Grammar
    from .vocabulary import Mask


CANNOT_GO_ON = "the grammar of structured_outputs cannot continue"
"""Every error of a grammar under way begins with it: the fault is the request's."""


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
        "_ids",
        "_num_seen",
        "_numbers",
        "_tail",
        "_texts",
        "ended_in_text",
        "error",
        "grammar",
        "is_finished",
        "is_waiting",
        "matcher",
        "waiting_mask",
    )

    def __init__(self, grammar: Grammar, after: After | None = None, stop_token_ids: Sequence[int] = ()) -> None:
        self.grammar = grammar
        self.waiting_mask: Mask | None = None
        if after is not None:
            self.waiting_mask = grammar.vocabulary.not_ending(stop_token_ids)
        self._texts, self._ids = _texts_and_ids(after)
        self._begin()

    def _begin(self) -> None:
        self.matcher = self.grammar.matcher()
        self._numbers = None if self.grammar.numbers is None else self.grammar.numbers()
        self._tail: bytes | tuple[int, ...] = b"" if self._texts else ()
        self._num_seen = 0  # of the texts
        self.is_waiting = bool(self._texts or self._ids)
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
        if reason.startswith("NoExtension"):
            reason = "it requires more text and allows none"
        return f"{CANNOT_GO_ON} ({reason})"

    def may_end_with(self, token: int) -> bool:
        """Whether the grammar is complete behind a token that ends the text."""
        if self.matcher.is_accepting():
            return True
        matcher = self.matcher.deep_copy()
        return bool(matcher.consume_token(token) and (matcher.is_stopped() or matcher.is_accepting()))

    def _begin_with(self, text: bytes) -> None:
        """Take what the token that ended the wait holds of the constrained text; white space counts to the wait.

        Raises:
            GrammarError: it may not come here.
        """
        for token in self.grammar.vocabulary.tokens_of(text):
            self.consume(token)

    def _wait(self, token: int) -> None:
        if not self._texts:
            self._tail = (*self._tail, token)[-len(self._ids) :]
            self.is_waiting = self._tail != self._ids
            return
        tail = self._tail + self.grammar.vocabulary.token_bytes(token)  # type: ignore[operator]
        while self.is_waiting:
            wanted = self._texts[self._num_seen]
            _, found, rest = tail.partition(wanted)
            if not found:
                self._tail = tail[-len(wanted) :]
                return
            tail = rest
            self._num_seen += 1
            self.is_waiting = self._num_seen < len(self._texts)
        self._begin_with(tail.lstrip())


def _texts_and_ids(after: After | None) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """The texts that a grammar waits for, and the token ids: one of the two, or neither."""
    entries = (after,) if isinstance(after, str) else after or ()
    texts = tuple(entry.encode() for entry in entries if isinstance(entry, str))
    return texts, tuple(entry for entry in entries if isinstance(entry, int))
