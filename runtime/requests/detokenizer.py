"""Converts a growing list of tokens to text incrementally, and finds stop strings in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, Protocol

from ..token_bytes import token_bytes
from .special_tokens import special_tokens
from .stop_strings import StopStrings

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
"""Earlier tokens that are decoded with the new ones, for spacing and for characters split over tokens."""
_WINDOW = 24
"""Number of tokens after which the decoded window is cut back to ``_CONTEXT``."""
_MAX_CHARACTER_TOKENS = 3
"""An incomplete UTF-8 character has at most 3 bytes, hence at most this many byte tokens."""


class Tokenizer(Protocol):
    """The part of a HuggingFace tokenizer that the runtime needs."""

    def __call__(self, text: str | list[str], **kwargs: Any) -> Any:
        """Encode; the result has ``input_ids``, a list of them for a list of texts."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Return the text of the tokens."""


class Detokenizer:
    """Decodes one completion's tokens as they come, at a constant cost per token.

    New tokens are decoded together with a few earlier ones; the text that this adds to the earlier ones' is new. So
    spaces come out as they do within a sentence, and a character made of several tokens appears once it is
    complete. (The idea is that of vLLM's ``detokenize_incrementally`` and HuggingFace's ``TextStreamer``.)

    Some decoders (Llama 2's, Gemma's: ``ByteFallback``) read a run of byte tokens as a whole, and turn every byte of
    it into U+FFFD if it is not UTF-8. This class keeps the complete characters of such a run, because they have been
    output already; only invalid bytes become U+FFFD. The text does not depend on how many tokens come together.

    Args:
        tokenizer: a HuggingFace tokenizer.
        prompt_token_ids: the tokens before the completion; only the last few are read.
        stop: strings that end the text; the earliest occurrence counts, and the text ends before it.
        skip_special_tokens: leave special tokens out of the text.
        kept_special_token_ids: special tokens that are kept all the same; None: none.
        include_stop: end the text after the stop string instead of before it.
        marks_ends: record where the text of each token ends, see ``ends``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: StopStrings | None = None,
        *,
        skip_special_tokens: bool = True,
        kept_special_token_ids: Collection[int] | None = None,
        include_stop: bool = False,
        marks_ends: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._marks_ends = marks_ends
        self._skip_special_tokens = skip_special_tokens
        self._left_out: Collection[int] = ()
        if skip_special_tokens and kept_special_token_ids is not None:
            self._skip_special_tokens = False
            self._left_out = special_tokens(tokenizer).keys() - set(kept_special_token_ids)
        self._include_stop = include_stop
        self._stop = stop
        self._start_window = self._context([int(token) for token in prompt_token_ids[-_WINDOW:]])
        self.reset()

    def reset(self) -> None:
        """Forget everything after the prompt."""
        self.num_tokens = 0
        """Tokens taken so far."""
        self.ends: list[int] = []
        """``length`` after each token, where recorded: a character belongs to the token that completes it."""
        self.stop_string: str | None = None
        """The stop string that ended the text."""
        self._text: list[str] = []
        self._length = 0
        self._stop_state = 0
        self._window = list(self._start_window)
        self._window_text = self._decode(self._window)
        self._held: list[int] = []  # tokens whose last character is incomplete

    @property
    def text(self) -> str:
        """The text so far: complete characters only, nothing after a stop string."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def text_between(self, start: int, end: int) -> str:
        """Return ``text[start:end]``; the cost grows with the text after ``start``, not with the whole text."""
        first, at = len(self._text), self._length
        while at > start:
            first -= 1
            at -= len(self._text[first])
        return "".join(self._text[first:])[start - at : end - at]

    def added_texts(self, first: int, end: int, *, at_end: bool) -> list[str]:
        """Return the text that each token from ``first`` to before ``end`` added, if ends are recorded.

        The text is "" for a token that was not taken, and for one whose character a later token completes.

        Args:
            first: index of a token.
            end: index after the last token.
            at_end: no token follows, so the last token gets the text that no other token has.
        """
        known = self.ends[max(first - 1, 0) : end]
        ends = [0] * (not first) + [min(each, self._length) for each in known]
        ends += [self._length] * (end - max(first - 1, 0) - len(known))
        if at_end:
            ends[-1] = self._length
        text = self.text_between(ends[0], self._length)
        return [text[begin - ends[0] : stop - ends[0]] for begin, stop in pairwise(ends)]

    @property
    def length(self) -> int:
        """Number of characters of ``text``."""
        return self._length

    @property
    def stable_length(self) -> int:
        """Number of final characters of ``text``: all but those that may begin a stop string."""
        if self.stop_string is not None or self._stop is None or self._include_stop:
            return self._length
        return self._length - self._stop.pending(self._stop_state)

    def append(self, token_ids: Sequence[int], check_stop: bool = True) -> bool:
        """Take the next tokens; no-op once a stop string was found.

        Args:
            token_ids: one or more new tokens.
            check_stop: look for stop strings in (or ending in) the text that they add.

        Returns:
            True if a stop string was found.
        """
        if self._marks_ends:
            for token in token_ids:
                self._append((token,), check_stop)
                self.ends.append(self._length)
            return self.stop_string is not None
        return self._append(token_ids, check_stop)

    def _append(self, token_ids: Sequence[int], check_stop: bool) -> bool:
        if self.stop_string is not None:
            return True
        self.num_tokens += len(token_ids)
        decoded = self._decode([*self._window, *self._held, *token_ids])
        if _REPLACEMENT not in decoded:
            self._held.extend(token_ids)
            return self._add(self._commit(len(self._held), decoded), check_stop)
        added = ""
        for token in token_ids:
            self._held.append(token)
            added += self._take()
        return self._add(added, check_stop)

    def finish(self, check_stop: bool = True) -> bool:
        """No token follows: turn an incomplete character at the end into U+FFFD. Returns as ``append`` does."""
        if self.stop_string is not None or not self._held:
            return self.stop_string is not None
        return self._add(self._take(at_end=True), check_stop)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, with its leading space; special tokens have their names."""
        return token_text(self._tokenizer, token_id)

    def _decode(self, token_ids: list[int]) -> str:
        if self._left_out:
            token_ids = [token for token in token_ids if token not in self._left_out]
        if not token_ids:
            return ""
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _context(self, prompt: list[int]) -> list[int]:
        """Return the end of the prompt that is decoded with what follows; if it ends within a character, only that.

        Characters before it would be part of a run of bytes that is not UTF-8 yet.
        """
        for begun in range(_MAX_CHARACTER_TOKENS + 1):
            end = len(prompt) - begun
            for start in range(end - 1, max(end - _MAX_CHARACTER_TOKENS - 2, -1), -1):
                text = self._decode(prompt[start:end])
                if text and not text.endswith(_REPLACEMENT):
                    return prompt[end:] if self._decode(prompt[end:]) else prompt[-_CONTEXT:]
        return prompt[-_CONTEXT:]

    def _take(self, at_end: bool = False) -> str:
        """Return the text of the held tokens as far as its characters are complete; all of it if no token follows."""
        added = ""
        while self._held:
            may_continue = False
            for count in range(len(self._held), 0, -1):
                decoded = self._decode(self._window + self._held[:count])
                if _REPLACEMENT not in decoded:
                    break
                alone = self._decode(self._held[:count])
                if _REPLACEMENT not in alone:
                    if self._window_text.endswith(_REPLACEMENT) and not decoded.endswith(alone):
                        # A run of bytes that was cut, or has an invalid byte, spoils the text that follows.
                        decoded, self._window, self._window_text = alone, [], ""
                    break
                may_continue |= count == len(self._held) and decoded.endswith(_REPLACEMENT)
            else:
                if may_continue and len(self._held) <= _MAX_CHARACTER_TOKENS and not at_end:
                    break
                # The next token does not complete the first one: it does not begin a character.
            added += self._commit(count, decoded)
        return added

    def _commit(self, count: int, decoded: str) -> str:
        """Move ``count`` held tokens to the window, whose text is now ``decoded``; returns what it adds."""
        before = self._window_text
        if decoded.startswith(before):
            added = decoded[len(before) :]
        elif before.endswith(_REPLACEMENT):
            # The prompt ended within a character, which is now complete.
            added = decoded[len(before.rstrip(_REPLACEMENT)) :]
        else:
            # They spoilt the run of bytes at the end of the window, whose characters have been output already.
            added = self._decode(self._held[:count])
        self._window += self._held[:count]
        del self._held[:count]
        if len(self._window) > _WINDOW:
            self._window = self._window[-_CONTEXT:]
            decoded = self._decode(self._window)
        self._window_text = decoded
        return added

    def _add(self, added: str, check_stop: bool) -> bool:
        if not added:
            return False
        if self._stop is not None:
            self._stop_state, count, found = self._stop.read(self._stop_state, added, look=check_stop)
            if found:
                self.stop_string = found
                self._length += count if self._include_stop else count - len(found)
                self._text = [(self.text + added)[: self._length]]
                return True
        self._text.append(added)
        self._length += len(added)
        return False


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a single token, with its leading space; special tokens have their names.

    A decoder may strip that space, as it takes the token for the start of a text.
    """
    known = token_bytes(tokenizer)
    found = None if known is None else known.of(token_id)
    if found is None:
        return str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    return found.decode(errors="replace")
