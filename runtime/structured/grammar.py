"""Grammars: compiled for a vocabulary and cached, or rejected with a reason."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from .asked import After, AskedOutput, read_structured_outputs
from .json_numbers import NumberLengths
from .source import GrammarSource
from .state import GrammarState
from .vocabulary import Vocabulary, load_llguidance, vocabulary_of

_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
"""Of llguidance's ``LLParserLimits``: some tens of milliseconds for a step, some hundred for a grammar."""


class Grammar:
    """A compiled grammar, shared by all that ask for it.

    Attributes:
        vocabulary: whose tokens it speaks of.
        numbers: makes what follows the numbers of its text; None: nothing is known to be JSON.
        warnings: what of a schema is not enforced; empty with ``strict``.
        spellings: text that it forced → tokens in which the model wrote it last.

    Args:
        matcher: before the first token.
        vocabulary, numbers, warnings: the attributes.
        again: compiles the grammar once more.
    """

    def __init__(
        self,
        matcher: Any,
        vocabulary: Vocabulary,
        numbers: Callable[[], NumberLengths] | None,
        warnings: tuple[str, ...],
        again: Callable[[], Any],
    ) -> None:
        self._matcher = matcher
        self._again = again
        self._scout: Any = None
        self._may_scout = True
        self._lock = threading.Lock()
        self.vocabulary = vocabulary
        self.numbers = numbers
        self.warnings = warnings
        self.spellings: dict[bytes, tuple[int, ...]] = {}

    def matcher(self) -> Any:
        """A matcher of its own, before the first token."""
        with self._lock:
            return self._matcher.deep_copy()

    def scout(self) -> Any:
        """A matcher of its own that may look far ahead, before the first token; None once that took too much work.

        Matchers share what they find out of a grammar, which is limited. So these are copies of another one.
        """
        with self._lock:
            if self._scout is None and self._may_scout:
                self._scout = self._again()
            return self._scout.deep_copy() if self._may_scout else None

    def stop_scouting(self) -> None:
        """Note that to look ahead takes too much work."""
        self._may_scout, self._scout = False, None

    def start(self, after: After | None = None, stop_token_ids: Sequence[int] = ()) -> GrammarState:
        """The state of one completion, before its first token; arguments as ``GrammarState``'s."""
        return GrammarState(self, after, stop_token_ids)


def compile_grammar(asked: AskedOutput, vocabulary: Vocabulary) -> Grammar:
    """Compile the grammar of a requested output, or return it from the vocabulary's cache.

    Raises:
        ValueError: it cannot be enforced, is too large, or allows no text; one line with llguidance's reason.
    """
    source = _source(asked)
    digest = hashlib.sha256(source).digest()
    found = vocabulary.kept.get(digest)
    if found is None:
        try:
            found = _compile(asked, vocabulary)
        except (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of llguidance is not an Exception
            name = type(error).__name__
            raise ValueError(
                f"structured_outputs.{asked.kind} could not be compiled ({name}); simplify it"
            ) from error
        vocabulary.kept.put(digest, found, len(source))
    result: Grammar = found
    return result


def is_compiled(asked: AskedOutput, vocabulary: Vocabulary) -> bool:
    """True if ``compile_grammar`` would find it."""
    return vocabulary.kept.get(hashlib.sha256(_source(asked)).digest()) is not None


def _source(asked: AskedOutput) -> bytes:
    return json.dumps([asked.kind, asked.value, asked.strict, asked.whitespace]).encode()


def check_structured(
    structured_outputs: object, tokenizer: Any, vocab_size: int | None = None, eos_token_ids: Iterable[int] = ()
) -> list[str]:
    """Check what a request asks for before it is handed to an engine.

    Args:
        structured_outputs: as for ``SamplingParams``.
        tokenizer: the engine's.
        vocab_size: of the model's logits; None: the tokenizer's.
        eos_token_ids: the model's; empty: the tokenizer's.

    Returns:
        Warnings: what of a schema with ``"strict": False`` is not enforced.

    Raises:
        ValueError: it is refused; one line that says why.
    """
    asked = read_structured_outputs(structured_outputs)
    return list(compile_grammar(asked, vocabulary_of(tokenizer, vocab_size, eos_token_ids)).warnings)


def _compile(asked: AskedOutput, vocabulary: Vocabulary) -> Grammar:
    name = f"structured_outputs.{asked.kind}"
    source = GrammarSource(name, asked)
    if source.problems and asked.strict:
        raise ValueError(f"{name} cannot be enforced: {source.problems[0]}; change it, or use strict=False")
    written = source.written(lenient=bool(source.problems))
    matcher = _matcher(written, vocabulary)
    if matcher.is_error() and not asked.strict:
        written = source.written(lenient=True)
        matcher = _matcher(written, vocabulary)
    error = matcher.get_error() or _first_steps(name, matcher.deep_copy())
    if error:
        remedy = ", or use strict=False" if asked.strict and asked.kind in ("json", "structural_tag") else ""
        raise ValueError(f"{name} cannot be enforced: {_reason(error)}; change it{remedy}")
    if source.numbers is not None:
        vocabulary.without_digits(0)  # a look at all tokens, which no step should have to wait for
    warnings = (*matcher.get_grammar_warnings(), *source.problems)
    return Grammar(matcher, vocabulary, source.numbers, warnings, partial(_matcher, written, vocabulary))


def _first_steps(name: str, matcher: Any) -> str:
    """The error of the first two masks, "" for none: what takes too much work, or allows nothing, never runs."""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if not allowed and not matcher.is_error():
        raise ValueError(f"{name} allows no text; relax it")
    if not matcher.is_error():
        matcher.try_consume_tokens([(allowed & -allowed).bit_length() - 1])
        matcher.compute_bitmask()
    return str(matcher.get_error())


def _matcher(source: str, vocabulary: Vocabulary) -> Any:
    llguidance = load_llguidance()
    limits = llguidance.LLParserLimits(**_LIMITS)
    return llguidance.LLMatcher(vocabulary.engine, source, log_level=0, limits=limits)


def _reason(error: str) -> str:
    """llguidance's reason on one line."""
    lines = [line.strip() for line in error.splitlines()]
    kept = [line for line in lines if line and set(line) - set("^ ") and line != "<non-verbose/>"]
    text = "it allows no text" if error.startswith("NoExtension") else " ".join(kept)
    return text if len(text) <= 300 else text[:297] + "..."
