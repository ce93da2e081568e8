"""What a user may ask about how tokens are chosen and when a request ends; the names are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real

GREEDY_BELOW = 1e-5
"""Temperatures below this mean argmax: dividing by them would overflow (vLLM uses the same bound)."""

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
"""The seeds that ``torch.manual_seed`` takes."""


def _whole(name: str, value: object, lowest: int, remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < lowest:
        raise ValueError(f"{name}={value!r} is not a whole number >= {lowest}; {remedy}")
    return int(value)


def _real(name: str, value: object, lowest: float, highest: float, open_low: bool, remedy: str) -> float:
    if not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value):
        number = float(value)
        if (number > lowest if open_low else number >= lowest) and number <= highest:
            return number
    bounds = f"{'(' if open_low else '['}{lowest:g}, {highest:g}{')' if math.isinf(highest) else ']'}"
    raise ValueError(f"{name}={value!r} is not a number in {bounds}; {remedy}")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    Attributes:
        max_tokens: most tokens to generate, >= 1.
        min_tokens: tokens before EOS or ``stop_token_ids`` may be chosen, or a stop string end the request.
        temperature: divides the logits; 0 (anything below 1e-5) is greedy.
        top_k: keep the k most likely tokens (ties with the k-th stay); 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        seed: makes the draws of this request reproducible, whatever else runs beside it.
        stop: strings that end the text; they are not part of it. A single string is accepted.
        stop_token_ids: token ids that end the request.
        ignore_eos: keep generating after the model's end-of-sequence token.
        logprobs: per token, report this many most likely tokens beside the chosen one; None reports nothing.
        n: completions of the same prompt; completion i uses ``seed + i``.
        repetition_penalty: > 1 makes tokens of the prompt and of the output less likely, < 1 more likely
            (arXiv 1909.05858; as in HuggingFace, negative scores are multiplied, others divided).

    Raises:
        ValueError: a value is out of range; the message names argument, value and remedy.
    """

    max_tokens: int = 16
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
    repetition_penalty: float = 1.0

    is_greedy: bool = field(init=False, repr=False, compare=False, default=False)
    """The most likely token is taken, nothing is drawn."""
    is_plain: bool = field(init=False, repr=False, compare=False, default=False)
    """The argmax of the untouched logits is the answer and nothing else is asked."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("max_tokens", _whole("max_tokens", self.max_tokens, 1, "ask for at least one token"))
        put("min_tokens", _whole("min_tokens", self.min_tokens, 0, "use 0 for no minimum"))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        inf = math.inf
        put("temperature", _real("temperature", self.temperature, 0, inf, False, "use 0 for greedy decoding"))
        put("top_k", _whole("top_k", self.top_k, -1, "use 0 or -1 to keep every token"))
        put("top_p", _real("top_p", self.top_p, 0, 1, True, "use 1.0 to keep every token"))
        put("min_p", _real("min_p", self.min_p, 0, 1, False, "use 0.0 to keep every token"))
        put(
            "repetition_penalty",
            _real("repetition_penalty", self.repetition_penalty, 0, inf, True, "use 1.0 for no penalty"),
        )
        if self.seed is not None:
            seed = _whole("seed", self.seed, SEED_MIN, "use None for no seed")
            if seed > SEED_MAX:
                raise ValueError(f"seed={self.seed} does not fit in 64 bits; use a seed <= {SEED_MAX}")
            put("seed", seed)
        put("stop", self._checked_stop())
        put("stop_token_ids", self._checked_stop_ids())
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} is not a bool; use True or False")
        if self.logprobs is not None:
            put("logprobs", _whole("logprobs", self.logprobs, 0, "use None for no log-probabilities"))
        put("n", _whole("n", self.n, 1, "ask for at least one completion"))

        put("is_greedy", self.temperature < GREEDY_BELOW)
        put(
            "is_plain",
            self.is_greedy and self.repetition_penalty == 1.0 and self.min_tokens == 0 and self.logprobs is None,
        )

    def _checked_stop(self) -> tuple[str, ...]:
        stop = self.stop
        if stop is None:
            return ()
        if isinstance(stop, str):
            stop = (stop,)
        if not hasattr(stop, "__iter__"):
            raise ValueError(f"stop={stop!r} is not text; use a string or a list of strings")
        for entry in stop:
            if not isinstance(entry, str) or not entry:
                raise ValueError(f"stop={self.stop!r} holds {entry!r}; use non-empty strings")
        return tuple(stop)

    def _checked_stop_ids(self) -> tuple[int, ...]:
        ids = self.stop_token_ids
        if ids is None:
            return ()
        if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
            raise ValueError(f"stop_token_ids={ids!r} is not a list of token ids; use a list such as [2]")
        for entry in ids:
            if isinstance(entry, bool) or not isinstance(entry, Integral) or entry < 0:
                raise ValueError(f"stop_token_ids={ids!r} holds {entry!r}; use token ids, whole numbers >= 0")
        return tuple(int(entry) for entry in ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty when there is none."""
        return self.stop  # type: ignore[return-value]  # __post_init__ made it a tuple

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as a tuple, empty when there is none."""
        return self.stop_token_ids  # type: ignore[return-value]  # __post_init__ made it a tuple

    def completion(self, index: int) -> SamplingParams:
        """Parameters of completion ``index`` of ``n`` as a request of its own: ``n=1``, ``seed + index``."""
        if self.n == 1 and index == 0:
            return self
        seed = None if self.seed is None else self.seed + index
        if seed is not None and seed > SEED_MAX:
            seed -= 2**64
        return replace(self, n=1, seed=seed)
