"""The vocabulary of a model as grammars see it: the bytes of its tokens, and which of them end a text."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ..shown import shown

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.uint32]
"""``[ceil(size / 32)]``; bit ``i % 32`` of word ``i // 32`` stands for token i."""

MAX_DIGITS = 20
"""Of a JSON number in a row: before its point, and behind it."""
MAX_EXPONENT_DIGITS = 2


MAX_KEPT = 256
"""Grammars of a vocabulary."""
MAX_KEPT_BYTES = 2**19
"""Of their sources together; compiled they take some hundred times as much."""


class Kept:
    """What was asked for last, by digest; any thread may call it."""

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
        """Keep something, in place of what was not asked for for longest; ``size`` is that of its source."""
        with self._lock:
            self._bytes += size - self._entries.pop(digest, (None, 0))[1]
            self._entries[digest] = (entry, size)
            while len(self._entries) > MAX_KEPT or (self._bytes > MAX_KEPT_BYTES and len(self._entries) > 1):
                self._bytes -= self._entries.popitem(last=False)[1][1]


class Vocabulary:
    """Tokens of one tokenizer, for a model whose logits have so many columns.

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
        ValueError: llguidance is not installed, or takes no tokenizer of that kind.
    """

    def __init__(self, tokenizer: Any, size: int | None = None, eos_token_ids: Iterable[int] = ()) -> None:
        load_llguidance()
        known = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
        wanted = None if size is None else max(size, known)
        ids = sorted(token for token in eos_token_ids if wanted is None or token < wanted)
        own = getattr(tokenizer, "eos_token_id", None)
        try:
            from llguidance.hf import from_tokenizer

            self.engine = from_tokenizer(tokenizer, n_vocab=wanted, eos_token=ids or own)
        except Exception as error:
            raise ValueError(
                f"structured_outputs needs a fast tokenizer, and llguidance does not take this "
                f"{type(tokenizer).__name__} ({shown(str(error))}); leave structured_outputs out"
            ) from error
        self.size: int = self.engine.vocab_size
        self.num_words = (self.size + 31) // 32
        self.eos_token_ids = frozenset(self.engine.eos_tokens) if ids or own is not None else frozenset()
        self.kept = Kept()
        """Compiled grammars."""
        self._digits: dict[int, Mask] = {}

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        result: bytes = self.engine.decode_bytes([token])
        return result

    def tokens_of(self, text: bytes) -> list[int]:
        """Tokens that stand for these bytes."""
        result: list[int] = self.engine.tokenize_bytes(text) if text else []
        return result

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

    @cached_property
    def _leading_digits(self) -> npt.NDArray[np.uint8]:
        counts = np.zeros(self.size, np.uint8)
        for token in range(self.size):
            text = self.token_bytes(token)
            rest = text.lstrip(b"0123456789")
            counts[token] = min(len(text) - len(rest), 255)
        return counts


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
