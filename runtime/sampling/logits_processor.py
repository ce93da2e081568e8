"""Changes that requests make to logits before the temperature: bans, biases, penalties.

Each rule is one indexed operation on the logits of all requests that use it. The data that a rule needs about a
request (the tokens seen, and how often) is kept per request and grows with its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..requests.request import Request
from ..requests.sampling_params import SamplingParams

_Ids: TypeAlias = "npt.NDArray[np.int64]"
_Floats: TypeAlias = "npt.NDArray[np.float32]"


class LogitsProcessor:
    """Applies the rules of ``SamplingParams`` to logits, in vLLM's order.

    1. ``allowed_token_ids``: sets all others to -inf. 2. ``bad_words``: sets tokens that would complete one to -inf.
    3. ``min_tokens``: sets EOS, ignored or not, and ``stop_token_ids`` to -inf. 4. ``logit_bias`` is added.
    5. ``repetition_penalty``: divides the logits of prompt and output tokens, or multiplies negative ones.
    6. ``frequency_penalty`` times occurrences in the output, then 7. ``presence_penalty`` are subtracted.

    Token ids beyond the vocabulary have no effect.

    Args:
        eos_token_ids: the model's end-of-sequence ids, which ``min_tokens`` suppresses.
    """

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._states: WeakKeyDictionary[Request, _State] = WeakKeyDictionary()

    def apply(self, x: Tensor, requests: Sequence[Request]) -> None:
        """Change ``x``, ``[M, V]`` contiguous fp32 logits of M requests, in place."""
        rows: list[tuple[int, _State]] = []
        for i, request in enumerate(requests):
            if request.params.changes_logits:
                state = self._states.get(request)
                if state is None or state.num_output_tokens > request.num_output_tokens:
                    # None, or outputs were withdrawn, as after an interrupted step.
                    state = self._states[request] = _State(request, x.shape[1], self._eos_token_ids)
                state.update(request)
                rows.append((i, state))
        if not rows:
            return
        flat = x.view(-1)
        vocab = x.shape[1]

        def gather(ids_of: Callable[[_State], _Ids | None]) -> tuple[Tensor, list[_State], list[int]]:
            """Return the positions in ``flat`` of each state's ids, those states, and their numbers of positions."""
            found = [(i, state, ids) for i, state in rows if (ids := ids_of(state)) is not None]
            if not found:
                return _NOWHERE, [], []
            places = torch.from_numpy(np.concatenate([ids + i * vocab for i, _, ids in found]))
            return places.to(x.device), [state for _, state, _ in found], [len(ids) for _, _, ids in found]

        def spread(values: list[float], lengths: list[int]) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(x.device)

        places, states, _ = gather(lambda state: state.allowed)
        if states:
            kept = flat[places]
            x[torch.tensor([i for i, state in rows if state.allowed is not None], device=x.device)] = -torch.inf
            flat[places] = kept

        places, states, _ = gather(_State.banned)
        if states:
            flat[places] = -torch.inf

        places, states, _ = gather(lambda state: state.biased)
        if states:
            # A mapping contains each token once.
            flat[places] += torch.from_numpy(
                np.concatenate([state.bias for state in states if state.bias is not None])
            ).to(x.device)

        places, states, lengths = gather(_State.seen_ids)
        if states:
            # A token listed twice is read before and written after: it is penalized once.
            factor = spread([state.params.repetition_penalty for state in states], lengths)
            old = flat[places]
            flat[places] = torch.where(old < 0, old * factor, old / factor)

        places, states, lengths = gather(_State.counted_ids)
        if states:
            counts = np.concatenate([state.counted.counts for state in states if state.counted])
            frequency = spread([state.params.frequency_penalty for state in states], lengths)
            new = flat[places] - frequency * torch.from_numpy(counts).to(x.device)
            flat[places] = new - spread([state.params.presence_penalty for state in states], lengths)


_NOWHERE = torch.empty(0, dtype=torch.int64)


class _State:
    """State of one request's rules, up to the output that ``update`` has seen."""

    def __init__(self, request: Request, vocab: int, eos_token_ids: tuple[int, ...]) -> None:
        params: SamplingParams = request.params
        self.params = params
        self.num_output_tokens = 0
        self.allowed = None if params.allowed_ids is None else _within(params.allowed_ids, vocab)
        self._vocab = vocab
        self._words = params.banned_sequences
        # A grammar's mask knows where the sequence may end, and where it must end.
        leaves_eos = params.has_own_ends or request.grammar is not None
        ends = params.stop_ids if leaves_eos else params.stop_ids + eos_token_ids
        self._held_back = _within(np.array(ends, np.int64), vocab)
        self._completing: list[_Ids] = []
        self.biased, self.bias = params.biased_ids, params.biases
        if self.biased is not None and self.bias is not None and self.biased.max() >= vocab:
            self.bias = self.bias[self.biased < vocab]
            self.biased = _within(self.biased, vocab)
        self.seen = _SeenTokens(request, vocab) if params.repetition_penalty != 1.0 else None
        penalized = params.presence_penalty or params.frequency_penalty
        self.counted = _CountedTokens() if penalized else None

    def update(self, request: Request) -> None:
        """Add the new output tokens."""
        output = request.output_token_ids
        new = output[self.num_output_tokens :]
        self.num_output_tokens = len(output)
        if self.seen is not None:
            self.seen.add(new)
        if self.counted is not None:
            self.counted.add(new)
        self._completing = [] if self._words is None else self._words.completing(output)

    def seen_ids(self) -> _Ids | None:
        """Return the tokens of prompt and output; None without ``repetition_penalty``."""
        return None if self.seen is None else self.seen.ids

    def counted_ids(self) -> _Ids | None:
        """Return the distinct output tokens; None without the penalties that count them."""
        return None if self.counted is None else self.counted.ids

    def banned(self) -> _Ids | None:
        """Return the tokens that must not come next; None without such a rule."""
        parts = [ids[ids < self._vocab] for ids in self._completing]
        if self.num_output_tokens < self.params.min_tokens:
            parts.append(self._held_back)
        parts = [part for part in parts if len(part)]
        return np.concatenate(parts) if parts else None


class _SeenTokens:
    """Distinct prompt tokens and all output tokens, as an array that grows with the output."""

    def __init__(self, request: Request, vocab: int) -> None:
        prompt = np.unique(np.asarray(request.prompt_token_ids, np.int64))
        self._ids = _GrowingArray(prompt[prompt < vocab], np.int64)

    def add(self, tokens: Sequence[int]) -> None:
        self._ids.extend(tokens)

    @property
    def ids(self) -> _Ids:
        return self._ids.values


class _CountedTokens:
    """Distinct output tokens and their counts."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids = _GrowingArray((), np.int64)
        self._counts = _GrowingArray((), np.float32)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids.values):
                self._ids.extend((token,))
                self._counts.extend((0.0,))
            self._counts.values[place] += 1

    @property
    def ids(self) -> _Ids:
        return self._ids.values

    @property
    def counts(self) -> _Floats:
        return self._counts.values


class _GrowingArray:
    """An array with cheap ``extend``; ``values`` is a view that the next ``extend`` may invalidate."""

    def __init__(self, values: npt.ArrayLike, dtype: npt.DTypeLike) -> None:
        first = np.asarray(values, dtype)
        self._room = np.empty(len(first) + 64, dtype)
        self._room[: len(first)] = first
        self.values = self._room[: len(first)]

    def extend(self, new: Sequence[float]) -> None:
        count = len(self.values)
        if count + len(new) > len(self._room):
            self._room = np.concatenate([self.values, np.empty(count + len(new), self._room.dtype)])
        self._room[count : count + len(new)] = new
        self.values = self._room[: count + len(new)]


def _within(ids: _Ids, vocab: int) -> _Ids:
    """Return the ids below ``vocab``; if all are, the array itself, because many requests may share it."""
    return ids[ids < vocab] if len(ids) and ids.max() >= vocab else ids
