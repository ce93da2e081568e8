"""The vocabulary of a model for grammars: the bytes of its tokens, and the end tokens."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ..shown import shown
from ..token_bytes import TokenBytes

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.uint32]
"""``[ceil(size / 32)]``; bit ``i % 32`` of word ``i // 32`` stands for token i."""

MAX_DIGITS = 20
"""Of a JSON number in a row: before its point, and behind it."""
MAX_EXPONENT_DIGITS = 2


MAX_SPELLED = 4096
"""Texts of a vocabulary that grammars forced, with their tokens."""

MAX_KEPT = 256
"""Grammars of a vocabulary."""
MAX_KEPT_BYTES = 2**19
"""Of their sources together; compiled they take some hundred times as much."""


class Kept:
    """A thread-safe LRU cache of compiled grammars, by digest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def get(self, digest: bytes) -> Any | None:
        """What is kept, or None."""
        with self._lock:
            found = self._entries.get(digest)
            if found is None:
                return None
            self._entries.move_to_end(digest)
            return found[0]

    def put(self, digest: bytes, entry: Any, size: int) -> None:
        """Add an entry and evict the least recently used ones beyond the limits; ``size`` is that of its source."""
        with self._lock:
            self._bytes += size - self._entries.pop(digest, (None, 0))[1]
            self._entries[digest] = (entry, size)
            while len(self._entries) > MAX_KEPT or (self._bytes > MAX_KEPT_BYTES and len(self._entries) > 1):
                self._bytes -= self._entries.popitem(last=False)[1][1]


class _Tokens:
    """Tokens as llguidance reads them (its ``TokenizerWrapper``).

    Args:
        tokens: bytes of each, or its name where it is special.
        special: ids of those that are not part of any text.
        eos: ids of those that end a text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Collection[int], eos: Sequence[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos[0] if eos else None

    @cached_property
    def _ordinary(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {text: token for token, text in enumerate(self.tokens) if text and token not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ordinary), default=0)

    def are_ordinary(self, tokens: Collection[int]) -> bool:
        """Return True if all are part of texts."""
        return self._special.isdisjoint(tokens)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_token_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ordinary tokens that spell a text, long ones first; bytes that no token begins with are passed over."""
        rest = text.encode() if isinstance(text, str) else text
        found: list[int] = []
        while rest:
            known = (end for end in range(min(len(rest), self._longest), 0, -1) if rest[:end] in self._ordinary)
            end = next(known, 0)
            if end:
                found.append(self._ordinary[rest[:end]])
            rest = rest[max(end, 1) :]
        return found


class Vocabulary:
    """Tokens of one tokenizer, for a model whose logits have so many columns.

    Text is written in ordinary tokens only: a literal that spells a special token, an added token in angle brackets
    or one that ends a text never becomes that token. A grammar that means such a token says its name or id.

    Making one takes a second and 100 MB for 150,000 tokens; ``vocabulary_of`` keeps them.

    Args:
        tokenizer: a fast HuggingFace tokenizer.
        size: columns of the logits; a tokenizer with more tokens makes it larger.
        eos_token_ids: that end a text; empty: the tokenizer's.

    Attributes:
        size: tokens that masks have bits for.
        num_words: of a mask.
        eos_token_ids: that a grammar allows where a text may end.
        engine: what llguidance makes matchers with.

    Raises:
        ValueError: llguidance is not installed, or the tokens of the tokenizer cannot spell every text.
    """

    def __init__(self, tokenizer: Any, size: int | None = None, eos_token_ids: Iterable[int] = ()) -> None:
        llguidance = load_llguidance()
        known = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
        width = known if size is None else max(size, known)
        own = getattr(tokenizer, "eos_token_id", None)
        eos = sorted(token for token in eos_token_ids if token < width) or ([] if own is None else [own])
        try:
            read = TokenBytes(tokenizer)
            if not read.covers_all_text:
                raise ValueError("its tokens cannot spell every text")
            texts = [read.of(token) for token in range(width)]
            special = {token for token, text in enumerate(texts) if not text} | _special(tokenizer, eos)
            self._tokens = _Tokens([text or b"<[%d]>" % i for i, text in enumerate(texts)], special, eos)
            self.engine = llguidance.LLTokenizer(self._tokens, eos_token=eos or None)
        except Exception as error:
            raise ValueError(
                f"structured_outputs needs a fast tokenizer, not {type(tokenizer).__name__} ({shown(str(error))}); "
                "omit structured_outputs"
            ) from error
        self.size: int = self.engine.vocab_size
        self.num_words = (self.size + 31) // 32
        self.eos_token_ids = frozenset(eos)
        self.kept = Kept()
        """Compiled grammars."""
        self._digits: dict[int, Mask] = {}
        self._spelled: dict[bytes, list[int]] = {}
        self._backend = tokenizer.backend_tokenizer

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, its name if it is special."""
        return self._tokens.tokens[token]

    def tokens_of(self, text: bytes) -> list[int]:
        """Ordinary tokens that stand for these bytes, long ones first."""
        return self._tokens(text)

    def spelled(self, text: bytes) -> list[int]:
        """Return the ordinary tokens in which the tokenizer spells a text, as far as it is known to."""
        found = self._spelled.get(text)
        if found is None:
            found = self._encode(text.decode("utf-8", "ignore"))
            if b"".join(map(self.token_bytes, found)) != text or not self._tokens.are_ordinary(found):
                found = self.tokens_of(text)
            if len(self._spelled) >= MAX_SPELLED:
                self._spelled.clear()
            self._spelled[text] = found
        return found

    @cached_property
    def not_eos(self) -> Mask:
        """All tokens that end no text."""
        return ~self.mask_of(self.eos_token_ids)

    def not_ending(self, stop_token_ids: Iterable[int]) -> Mask:
        """All tokens but those that end a text, and these; ids beyond the vocabulary say nothing."""
        return self.not_eos & ~self.mask_of(token for token in stop_token_ids if token < self.size)

    def without_digits(self, most: int) -> Mask:
        """All tokens but those that begin with more than ``most`` digits."""
        found = self._digits.get(most)
        if found is None:
            begin = self._leading_digits
            found = self._digits[most] = ~self.mask_of(np.flatnonzero(begin > most).tolist())
        return found

    def mask_of(self, token_ids: Iterable[int]) -> Mask:
        """The bits of these tokens."""
        mask = np.zeros(self.num_words, np.uint32)
        for token in token_ids:
            mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _leading_digits(self) -> npt.NDArray[np.uint8]:
        counts = np.zeros(self.size, np.uint8)
        for token in range(self.size):
            text = self.token_bytes(token)
            rest = text.lstrip(b"0123456789")
            counts[token] = min(len(text) - len(rest), 255)
        return counts


def _special(tokenizer: Any, eos: Iterable[int]) -> set[int]:
    """Tokens that are not part of any text: special ones, added ones such as ``<think>`` or ``</b>``, and ends."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    marks = {i for i, token in added.items() if token.special or token.content[:1] + token.content[-1:] == "<>"}
    return marks | set(eos)


def load_llguidance() -> Any:
    """The module ``llguidance``, which is imported when somebody asks for a grammar.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise ValueError('structured_outputs needs llguidance; pip install "torch-pagoda[structured]"') from None
    return llguidance


_lock = threading.Lock()
_known: WeakKeyDictionary[Any, dict[tuple[int | None, frozenset[int]], Vocabulary]] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any, size: int | None = None, eos_token_ids: Iterable[int] = ()) -> Vocabulary:
    """The ``Vocabulary`` of a tokenizer, made once.

    Raises:
        ValueError: as ``Vocabulary`` does.
    """
    load_llguidance()
    key = (size, frozenset(eos_token_ids))
    with _lock:
        known = _known.setdefault(tokenizer, {})
        if key not in known:
            known[key] = Vocabulary(tokenizer, *key)
        return known[key]


def prepare_vocabulary(tokenizer: Any, size: int | None = None, eos_token_ids: Iterable[int] = ()) -> bool:
    """Make a tokenizer's ``Vocabulary`` before somebody needs it: no other thread runs for most of that time.

    Returns:
        False if it has none: llguidance is not installed, or does not take it.
    """
    try:
        vocabulary_of(tokenizer, size, eos_token_ids).without_digits(0)
    except ValueError as error:
        logger.debug("nothing is prepared: %s", error)
        return False
    return True
