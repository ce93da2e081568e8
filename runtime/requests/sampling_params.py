"""Sampling parameters: how tokens are chosen and when a request ends; the names are vLLM's."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..structured.asked import AskedOutput, plain_json, read_structured_outputs
from .bad_words import BadWords
from .checks import check_bool, real_number, shown, texts, token_ids, whole_number
from .request_limits import (
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_COMPLETIONS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
)
from .stop_strings import StopStrings

GREEDY_BELOW = 1e-5
"""Temperatures below this select the argmax, because dividing by them would overflow (vLLM uses the same bound)."""

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
"""Smallest and largest seed that ``torch.manual_seed`` accepts."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping parameters of one request.

    Attributes:
        max_tokens: most tokens to generate; None: until the context is full; 0: none, the engine only computes the
            prompt and, with ``prompt_logprobs``, scores it.
        min_tokens: tokens to generate before EOS (even with ``ignore_eos``) or ``stop_token_ids`` may be sampled or a
            stop string may end the request.
        temperature: divides the logits; 0 (anything below 1e-5) is greedy.
        top_k: keep the k most likely tokens (ties with the k-th stay); 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        seed: makes the draws of this request reproducible, whatever else runs in the batch; -1 means None.
        stop: strings that end the text; the text excludes them unless ``include_stop_str_in_output``. A single
            string is accepted.
        stop_token_ids: token ids that end the request.
        ignore_eos: keep generating after the model's end-of-sequence token.
        logprobs: most likely tokens to report per token, in addition to the sampled one; None reports nothing.
        n: completions of the same prompt; completion i uses ``seed + i``.
        best_of: number of completions to run, >= n; the n with the highest cumulative log-probability are returned,
            best first. None runs n and returns them in the order of their seeds.
        repetition_penalty: > 1 makes tokens of the prompt and of the output less likely, < 1 more likely
            (arXiv 1909.05858; as in HuggingFace, negative scores are multiplied, others divided).
        presence_penalty: subtracted from the logit of each token that the output contains, in [-2, 2]. Prompt
            tokens do not count, neither here nor in ``frequency_penalty``.
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: token id → value added to its logit, in [-100, 100].
        bad_words: text that may not be generated, wherever it begins: each word is tokenized with and without a
            leading space, and the last token of such a sequence is banned when the output ends in the others.
        allowed_token_ids: the only tokens that may be chosen; None allows all.
        prompt_logprobs: number of most likely tokens to report per prompt token but the first, in addition to the
            prompt token itself; None reports nothing.
        skip_special_tokens: leave special tokens out of the text.
        kept_special_token_ids: special tokens that stay in the text all the same, such as those that mark a tool
            call; None: none.
        include_stop_str_in_output: end the text with the stop string, or with the text of the stop or end-of-sequence
            token unless that is special and skipped.
        structured_outputs: the form of the output, as one of ``{"json": schema}``, ``{"json_object": True}``,
            ``{"regex": text}``, ``{"choice": [text, ...]}``, ``{"grammar": text}`` or ``{"structural_tag": ...}``;
            ``structured.asked.read_structured_outputs`` describes each, and the keys allowed with it. Only
            tokens that can still complete that form may be sampled; the output ends with "stop" when it is complete
            and nothing can follow, regardless of ``min_tokens`` and ``ignore_eos``. Stop strings and ``max_tokens``
            may end it earlier.

    Raises:
        ValueError: a value is out of range, or above a limit of ``request_limits``; the message names argument, value
            and remedy.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: str | Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    kept_special_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)

    is_greedy: bool = field(init=False, repr=False, compare=False, default=False)
    """True if the most likely token is taken and nothing is sampled."""
    changes_logits: bool = field(init=False, repr=False, compare=False, default=False)
    """True if the logits are changed before the temperature applies."""
    is_plain: bool = field(init=False, repr=False, compare=False, default=False)
    """True if the argmax of the unchanged logits is the answer and nothing else is requested."""
    asked_output: AskedOutput | None = field(init=False, repr=False, compare=False, default=None)
    """``structured_outputs``, parsed."""

    stop_automaton: StopStrings | None = field(init=False, repr=False, compare=False, default=None)
    """Automaton that finds ``stop`` in the text; None without stop strings."""
    stop_id_set: frozenset[int] = field(init=False, repr=False, compare=False, default=frozenset())
    """``stop_token_ids``."""

    allowed_ids: npt.NDArray[np.int64] | None = field(init=False, repr=False, compare=False, default=None)
    """``allowed_token_ids`` as an array, shared by all completions."""
    biased_ids: npt.NDArray[np.int64] | None = field(init=False, repr=False, compare=False, default=None)
    """The keys of ``logit_bias`` as an array, shared by all completions; None if it is empty."""
    biases: npt.NDArray[np.float32] | None = field(init=False, repr=False, compare=False, default=None)
    """The values of ``logit_bias`` as an array, shared likewise."""

    has_own_ends: bool = field(init=False, repr=False, compare=False, default=False)
    """True if the model's end-of-sequence tokens are ordinary tokens, even for ``min_tokens``."""

    _bad_words: BadWords | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if self.max_tokens is not None:
            remedy = "use None to fill the context, or 0 to compute the prompt only"
            put("max_tokens", whole_number("max_tokens", self.max_tokens, 0, remedy))
        put("min_tokens", whole_number("min_tokens", self.min_tokens, 0, "use 0 for no minimum"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        inf = math.inf
        put("temperature", real_number("temperature", self.temperature, 0, inf, "use 0 for greedy decoding"))
        put("top_k", whole_number("top_k", self.top_k, -1, "use 0 or -1 to keep every token"))
        put("top_p", real_number("top_p", self.top_p, 0, 1, "use 1.0 to keep every token"))
        put("min_p", real_number("min_p", self.min_p, 0, 1, "use 0.0 to keep every token"))
        if self.seed is not None:
            seed = whole_number("seed", self.seed, SEED_MIN, "use None for no seed", highest=SEED_MAX)
            put("seed", None if seed == -1 else seed)
        put(
            "stop",
            ()
            if self.stop is None
            else texts("stop", self.stop, most=MAX_STOP_STRINGS, most_characters=MAX_STOP_CHARACTERS),
        )
        put("stop_automaton", StopStrings(self.stop_strings) if self.stop else None)
        put("stop_token_ids", () if self.stop_token_ids is None else token_ids("stop_token_ids", self.stop_token_ids))
        put("stop_id_set", frozenset(self.stop_ids))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                put(name, whole_number(name, count, 0, "use None for no log-probabilities", highest=MAX_LOGPROBS))
        put("n", whole_number("n", self.n, 1, "request at least one completion", highest=MAX_COMPLETIONS))
        if self.best_of is not None:
            remedy = "use None to return every completion that runs"
            put("best_of", whole_number("best_of", self.best_of, 1, remedy, highest=MAX_COMPLETIONS))
            if self.best_of < self.n:
                raise ValueError(f"best_of={self.best_of} is below n={self.n}; raise best_of or lower n")
            if self.best_of > 1 and self.temperature < GREEDY_BELOW:
                raise ValueError(
                    f"best_of={self.best_of} with temperature={self.temperature} runs the same completion several "
                    "times; use a temperature above 0, or beam search"
                )
        if self.max_tokens == 0 and self.num_completions > 1:
            name = "n" if self.best_of is None else "best_of"
            raise ValueError(
                f"{name}={self.num_completions} with max_tokens=0 computes the same prompt several times; use 1"
            )
        penalty = real_number(
            "repetition_penalty", self.repetition_penalty, 0, inf, "use 1.0 for no penalty", open_low=True
        )
        put("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, real_number(name, getattr(self, name), -2, 2, "use 0.0 for no penalty"))
        if self.logit_bias is not None:
            put("logit_bias", _checked_bias(self.logit_bias))
        if self.logit_bias:
            put("biased_ids", np.array(list(self.logit_bias), np.int64))
            put("biases", np.array(list(self.logit_bias.values()), np.float32))
        words = () if self.bad_words is None else self.bad_words
        words = texts("bad_words", words, most=MAX_BAD_WORDS, most_characters=MAX_BAD_WORDS_CHARACTERS)
        put("bad_words", tuple(dict.fromkeys(words)))
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError(
                    f"allowed_token_ids={shown(self.allowed_token_ids)} allows no token; use None to allow all"
                )
            put("allowed_token_ids", tuple(dict.fromkeys(allowed)))
            put("allowed_ids", np.array(self.allowed_token_ids, np.int64))
        if self.kept_special_token_ids is not None:
            put("kept_special_token_ids", token_ids("kept_special_token_ids", self.kept_special_token_ids))
        if self.structured_outputs is not None:
            put("asked_output", read_structured_outputs(self.structured_outputs))
            put("structured_outputs", plain_json("structured_outputs", self.structured_outputs))

        put("is_greedy", self.temperature < GREEDY_BELOW)
        put(
            "changes_logits",
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or bool(self.bad_words)
            or self.allowed_token_ids is not None,
        )
        put("is_plain", self._is_plain())

    def _is_plain(self) -> bool:
        return (
            self.is_greedy and not self.changes_logits and self.logprobs is None and self.structured_outputs is None
        )

    def cuts(self, vocab_size: int) -> bool:
        """Return True if ``top_k`` or ``top_p`` exclude tokens."""
        return 0 < self.top_k < vocab_size or self.top_p < 1.0

    @property
    def num_completions(self) -> int:
        """Number of completions that run: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty when there is none."""
        return self.stop  # type: ignore[return-value]  # __post_init__ made it a tuple

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as a tuple, empty when there is none."""
        return self.stop_token_ids  # type: ignore[return-value]  # __post_init__ made it a tuple

    @property
    def bad_words_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Token sequences of ``bad_words``, none of them empty.

        Raises:
            ValueError: the words are not tokenized yet.
        """
        banned = self.banned_sequences
        return () if banned is None else banned.token_ids

    @property
    def banned_sequences(self) -> BadWords | None:
        """``bad_words`` as a tree to look up in an output; None without bad words.

        Raises:
            ValueError: the words are not tokenized yet.
        """
        if self._bad_words is None and self.bad_words:
            words = shown(list(self.bad_words))
            raise ValueError(f"bad_words={words} are not tokenized; use an engine with a tokenizer")
        return self._bad_words

    def with_bad_words_token_ids(self, sequences: Sequence[Sequence[int]]) -> SamplingParams:
        """Return a copy that knows the tokens of its ``bad_words``."""
        other = copy.copy(self)
        object.__setattr__(other, "_bad_words", BadWords(sequences))
        return other

    def with_own_ends(self) -> SamplingParams:
        """Return a copy that only ``stop_token_ids`` end: the model's end-of-sequence tokens do not end it."""
        other = copy.copy(self)
        for name in ("ignore_eos", "has_own_ends"):
            object.__setattr__(other, name, True)
        return other

    def within(self, room: int) -> SamplingParams:
        """Return the parameters with ``max_tokens=None`` resolved to ``room``, the tokens left of the context."""
        if self.max_tokens is not None:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "max_tokens", room)
        return other

    def completion(self, index: int) -> SamplingParams:
        """Return the parameters of completion ``index`` as a separate request: ``n=1``, ``seed + index``.

        Completions share their prompt; only the first one requests its log-probabilities. With ``best_of``, every
        completion requests the log-probabilities of its tokens.
        """
        if self.num_completions == 1 and index == 0:
            return self
        seed = None if self.seed is None else self.seed + index
        if seed is not None and seed > SEED_MAX:
            seed -= 2**64
        changes = {
            "n": 1,
            "best_of": None,
            "seed": seed,
            "logprobs": 0 if self.logprobs is None and self.num_completions > self.n else self.logprobs,
            "prompt_logprobs": self.prompt_logprobs if index == 0 else None,
        }
        # A copy and not ``replace``: all completions share the checked and derived values.
        own = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(own, name, value)
        object.__setattr__(own, "is_plain", own._is_plain())
        return own


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={shown(bias)} is not a mapping; use a dict such as {{2: -100.0}}")
    ids = token_ids("logit_bias", list(bias))
    remedy = "use a bias between -100 and 100"
    values = [real_number(f"logit_bias[{token}]", value, -100, 100, remedy) for token, value in bias.items()]
    return dict(zip(ids, values, strict=True))
