"""The state of one completion in its grammar: a function of its settled tokens only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .asked import After
    from .grammar import Grammar
    from .vocabulary import Mask


CANNOT_GO_ON = "the grammar of structured_outputs cannot continue"
"""Every error of a grammar under way begins with it: the fault is the request's."""


MAX_SPELLED = 4096
"""Texts that a grammar forced whose tokens it keeps."""
_MARK = b"\xff"
_LONG_TOKEN = 32
"""Bytes; few tokens are longer."""


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
        "_begun",
        "_behind",
        "_forced",
        "_ids",
        "_num_consumed",
        "_num_seen",
        "_numbers",
        "_scout",
        "_spelling",
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
        self._num_consumed = 0  # tokens that the matcher has
        self._forced = self._begun = b""  # what is known to come next; with what has come of it
        self._spelling: tuple[int, ...] = ()  # of the latter
        self._scout: Any = None  # finds that out
        self._behind: list[int] = []  # tokens that it does not have yet
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
        self._num_consumed += 1
        self._behind.append(token)
        text = vocabulary.token_bytes(token)
        if self._forced:
            self._spell(token, text)
        if self._numbers is not None:
            self._numbers.feed(text)
        if self.matcher.is_stopped():
            self.is_finished = True
            self.ended_in_text = token not in vocabulary.eos_token_ids
        return self.is_finished

    def _spell(self, token: int, text: bytes) -> None:
        """Note a token in which a part of the forced text is written."""
        is_part = self._forced.startswith(text)
        self._forced = self._forced[len(text) :] if is_part else b""
        self._spelling += (token,) if is_part else ()
        if not self._forced:
            spellings = self.grammar.spellings
            if len(spellings) >= MAX_SPELLED:
                spellings.clear()
            spellings[self._begun] = self._spelling

    def restore(self, tokens: Sequence[int]) -> None:
        """Return to where the completion has these tokens, from wherever an interrupted call left this.

        Raises:
            GrammarError: as ``consume`` does.
        """
        self._begin()
        for token in tokens:
            self.consume(token)

    @contextmanager
    def trial(self, settled: Sequence[int]) -> Iterator[None]:
        """Return to the present state at the end of the ``with`` block, whatever was consumed in it.

        Args:
            settled: tokens of the completion now.
        """
        numbers = None if self._numbers is None else self._numbers.copy()
        before = [getattr(self, name) for name in _OF_A_TRIAL]
        count, num_behind = self._num_consumed, len(self._behind)
        try:
            yield
        finally:
            excess = self._num_consumed - count
            if self.matcher.is_error() or (excess and not self.matcher.rollback(excess)):
                self._restore_or_fail(settled)
            else:
                del self._behind[num_behind:]
            for name, value in zip(_OF_A_TRIAL, before, strict=True):
                setattr(self, name, value)
            self._numbers, self._num_consumed = numbers, count

    def _restore_or_fail(self, settled: Sequence[int]) -> None:
        """As ``restore``; where that takes too much work, the next mask finds the error."""
        try:
            self.restore(settled)
        except GrammarError:
            return

    def num_allowed(self, tokens: Sequence[int], settled: Sequence[int]) -> int:
        """Return how many of the ``tokens`` may come, one after the other; ``settled`` are those that came.

        All may that come while the grammar waits for its text to begin: what they begin it with is not looked at.
        """
        if self.is_finished or self.error is not None:
            return 0
        if not self.is_waiting:
            return int(self.matcher.validate_tokens(list(tokens)))
        count = 0
        with self.trial(settled):
            for token in tokens:
                if self.is_waiting:
                    if not _holds(self.waiting_mask, token):
                        break
                elif self.is_finished or not self.matcher.validate_tokens([token]):
                    break
                try:
                    self.consume(token)
                except GrammarError:
                    break
                count += 1
        return count

    def forced_tokens(self, most: int) -> list[int]:
        """Return the first ``most`` tokens of the only text that may come next; none where several may."""
        if self.is_waiting or self.is_finished or self.error is not None:
            return []
        if not self._forced:
            self._forced = self._begun = self._look_ahead()
            self._spelling = ()
        known = self.grammar.spellings.get(self._begun, ())
        if len(known) > len(self._spelling) and known[: len(self._spelling)] == self._spelling:
            return list(known[len(self._spelling) :][:most])
        text = self._forced[: most * _LONG_TOKEN]
        return self.grammar.vocabulary.spelled(text)[:most] if text else []

    def _look_ahead(self) -> bytes:
        """The only text that may come next."""
        if self._scout is None:
            self._scout = self.grammar.scout()
        if self._scout is None:
            return b""
        behind, self._behind = self._behind, []
        self._scout.consume_tokens(behind)
        ahead = self._scout.deep_copy()  # it goes to the end of that text
        text = ahead.compute_ff_bytes()
        if ahead.is_error() or self._scout.is_error():
            self.grammar.stop_scouting()
            self._scout = None
        # A byte that is in no text marks a token that the grammar names.
        return bytes(text).partition(_MARK)[0]

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


_OF_A_TRIAL = (
    "_tail",
    "_num_seen",
    "_forced",
    "_begun",
    "_spelling",
    "is_waiting",
    "is_finished",
    "ended_in_text",
    "error",
)
"""What a trial leaves as it was, besides the matcher and the numbers."""


def _holds(mask: Mask | None, token: int) -> bool:
    """Whether a mask allows a token."""
    return mask is not None and token // 32 < len(mask) and bool(mask[token // 32] >> (token % 32) & 1)


def _texts_and_ids(after: After | None) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """The texts that a grammar waits for, and the token ids: one of the two, or neither."""
    entries = (after,) if isinstance(after, str) else after or ()
    texts = tuple(entry.encode() for entry in entries if isinstance(entry, str))
    return texts, tuple(entry for entry in entries if isinstance(entry, int))
