"""Beam search: chooses the tokens that continue each beam, collects finished texts, and decides when to stop.

Independent of models and caches: it receives the most likely next tokens of each live beam and returns the beams of
the next step, each a child of one of the previous beams. Scores are accumulated in fp32 and compared as in
HuggingFace's ``generate(num_beams=...)`` (5.x, ``GenerationMixin._beam_search``), so the results are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..requests.beam_search_params import BeamSearchParams
from .logprobs import top_logprobs

Candidates: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""The most likely next tokens of a beam, and their log-probabilities."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A live text that may be continued.

    Attributes:
        parent: its index among the beams of the previous step; 0 in the first step.
        token_ids: tokens generated so far; the last one is new.
        cumulative_logprob: sum of their log-probabilities.
    """

    parent: int
    token_ids: tuple[int, ...]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text.

    Attributes:
        token_ids: generated tokens, including the end-of-sequence token.
        cumulative_logprob: sum of their log-probabilities.
        score: ``cumulative_logprob`` divided by ``len(token_ids) ** length_penalty``; the best text has the highest.
        finish_reason: "stop" for an end-of-sequence token, else "length".
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """A beam search for one prompt.

    In each step, pass the ``num_candidates`` most likely tokens of each of ``beams`` to ``advance``. The new
    ``beams`` determine how the sequences continue: a parent with several children is copied, one without children is
    dropped.

    Args:
        params: width, lengths and scores; ``max_tokens`` must not be None.
        eos_token_ids: the model's end-of-sequence ids.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int] = ()) -> None:
        if params.max_tokens is None:
            raise ValueError("max_tokens=None does not end a search; use the number of tokens left of the context")
        self.params = params
        self._max_tokens = params.max_tokens
        self.beams: list[Beam] = [Beam(0, (), 0.0)]
        """The live beams, best first; one without tokens at the start, none at the end."""
        self.is_done = False
        """True once no better text is possible, or no more steps are allowed."""
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._finished: list[Hypothesis] = []
        self._length = 0
        # Enough other candidates remain even if they include every end-of-sequence token of every beam.
        self.num_candidates = max(2, 1 + len(self._eos_token_ids)) * params.beam_width
        """Number of candidates per beam that ``advance`` expects (fewer if the vocabulary is smaller)."""

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """Finished texts, best first; ``beam_width`` of them at the end, or fewer if the model allowed fewer."""
        return list(self._finished)

    def advance(self, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike) -> list[Beam]:
        """Advance the search by one step.

        Args:
            token_ids: ``[B, K]``, the K most likely next tokens of each of the B ``beams``.
            logprobs: ``[B, K]``, their log-probabilities; -inf for tokens that must not follow.

        Returns:
            The new ``beams``.

        Raises:
            ValueError: the shapes do not match, or a log-probability is NaN.
            RuntimeError: the search has ended.
        """
        if self.is_done:
            raise RuntimeError("the search has ended; read hypotheses")
        ids = np.asarray(token_ids, np.int64)
        values = np.asarray(logprobs, np.float32)
        if ids.ndim != 2 or ids.shape != values.shape or len(ids) != len(self.beams):
            raise ValueError(
                f"token_ids of shape {ids.shape} and logprobs of shape {values.shape} do not match "
                f"{len(self.beams)} beams; pass one row of candidates per beam"
            )
        if np.isnan(values).any():
            raise ValueError("logprobs contains NaN; check the model's logits")
        width = self.params.beam_width
        before = np.array([beam.cumulative_logprob for beam in self.beams], np.float32)
        totals = (values + before[:, None]).ravel()
        # Of equal candidates the one with the better parent comes first, then the one listed first.
        order = np.argsort(-totals, kind="stable")[: self.num_candidates]
        order = order[totals[order] > -np.inf]
        parents = (order // ids.shape[1]).tolist()
        tokens = ids.ravel()[order].tolist()

        self._length += 1
        at_limit = self._length >= self._max_tokens
        going_on: list[Beam] = []
        ended: list[Hypothesis] = []
        for place, (parent, token, total) in enumerate(zip(parents, tokens, totals[order].tolist(), strict=True)):
            stops = token in self._eos_token_ids
            if stops or at_limit:
                # A candidate outside the best would not have been kept either, had it continued.
                if place < width:
                    text = (*self.beams[parent].token_ids, token)
                    score = self._score(total, self._length)
                    ended.append(Hypothesis(text, total, score, "stop" if stops else "length"))
            elif len(going_on) < width:
                going_on.append(Beam(parent, (*self.beams[parent].token_ids, token), total))
        # A stable sort: of equal texts the older one stays first.
        self._finished = sorted(self._finished + ended, key=lambda text: -text.score)[:width]
        self.is_done = not going_on or (len(self._finished) == width and not self._can_improve(going_on[0]))
        self.beams = [] if self.is_done else going_on
        return self.beams

    def _can_improve(self, best: Beam) -> bool:
        """Return True if a continuation of the best live beam may still be among the ``beam_width`` best."""
        params = self.params
        if params.early_stopping is True:
            return False
        patient = params.early_stopping == "never" and params.length_penalty > 0.0
        length = self._max_tokens if patient else self._length
        return self._score(best.cumulative_logprob, length) > self._finished[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return float(np.float32(cumulative_logprob) / np.float32(length**self.params.length_penalty))


def likely_tokens(logits: Tensor, counts: Sequence[int]) -> list[Candidates | None]:
    """Return the most likely tokens after each row.

    Args:
        logits: ``[M, V]``, any float dtype.
        counts: M numbers, the number of tokens for each row.

    Returns:
        M entries; None for a row without a valid choice: a NaN, +inf, or every token at -inf.
    """
    ids, values = (tensor.cpu().numpy() for tensor in top_logprobs(logits, max(counts)))
    # A row of log-softmax is either all NaN or has none.
    return [None if np.isnan(values[i, 0]) else (ids[i, :count], values[i, :count]) for i, count in enumerate(counts)]
