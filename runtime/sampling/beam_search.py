"""Beam search: which beams go on with which tokens, which texts are finished, when nothing better can come.

Knows nothing of models and caches: it is given the most likely next tokens of each live beam and answers with
the beams of the next step, each a child of one of the last. Scores are accumulated in fp32 and compared as in
HuggingFace's ``generate(num_beams=...)`` (5.x, ``GenerationMixin._beam_search``), so that the results are the same.
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
    """A text that may go on.

    Attributes:
        parent: its place among the beams of the step before; 0 in the first.
        token_ids: generated so far; the last one is new.
        cumulative_logprob: sum of their log-probabilities.
    """

    parent: int
    token_ids: tuple[int, ...]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished text.

    Attributes:
        token_ids: generated tokens, the end-of-sequence token included.
        cumulative_logprob: sum of their log-probabilities.
        score: that divided by ``len(token_ids) ** length_penalty``; the best has the highest.
        finish_reason: "stop" for an end-of-sequence token, else "length".
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """The search for one prompt.

    Each step: ``num_candidates`` most likely tokens of each of ``beams`` go to ``advance``, and the new ``beams``
    say how the sequences go on: a parent with several children is copied, one without is dropped.

    Args:
        params: width, lengths and scores; ``max_tokens`` is a number.
        eos_token_ids: the model's end-of-sequence ids.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int] = ()) -> None:
        if params.max_tokens is None:
            raise ValueError(
                "max_tokens=None does not end a search; give the number of tokens that there is room for"
            )
        self.params = params
        self._max_tokens = params.max_tokens
        self.beams: list[Beam] = [Beam(0, (), 0.0)]
        """The live beams, best first; one without tokens at the start, none at the end."""
        self.is_done = False
        """Nothing better can come, or nothing more may."""
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._finished: list[Hypothesis] = []
        self._length = 0
        # Even if every end-of-sequence token of every beam is among them, enough others are.
        self.num_candidates = max(2, 1 + len(self._eos_token_ids)) * params.beam_width
        """How many tokens ``advance`` wants per beam (fewer where the vocabulary is smaller)."""

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """Finished texts, best first; ``beam_width`` of them at the end, fewer where the model allowed fewer."""
        return list(self._finished)

    def advance(self, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike) -> list[Beam]:
        """Take one step.

        Args:
            token_ids: ``[B, K]``, the K most likely next tokens of each of the B ``beams``.
            logprobs: ``[B, K]``, their log-probabilities; -inf for what may not come.

        Returns:
            The new ``beams``.

        Raises:
            ValueError: the shapes do not fit, or a log-probability is NaN.
            RuntimeError: the search is over.
        """
        if self.is_done:
            raise RuntimeError("the search is over; read hypotheses")
        ids = np.asarray(token_ids, np.int64)
        values = np.asarray(logprobs, np.float32)
        if ids.ndim != 2 or ids.shape != values.shape or len(ids) != len(self.beams):
            raise ValueError(
                f"token_ids of shape {ids.shape} and logprobs of shape {values.shape} do not fit "
                f"{len(self.beams)} beams; give a row of candidates for each"
            )
        if np.isnan(values).any():
            raise ValueError("logprobs holds NaN; the model's logits allow no choice")
        width = self.params.beam_width
        before = np.array([beam.cumulative_logprob for beam in self.beams], np.float32)
        totals = (values + before[:, None]).ravel()
        # Among equals the better parent comes first, and of one parent's tokens the one that is listed first.
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
                # What is not among the best would not have been kept either, had it gone on.
                if place < width:
                    text = (*self.beams[parent].token_ids, token)
                    score = self._score(total, self._length)
                    ended.append(Hypothesis(text, total, score, "stop" if stops else "length"))
            elif len(going_on) < width:
                going_on.append(Beam(parent, (*self.beams[parent].token_ids, token), total))
        # A stable sort: among equals the older text stays in front.
        self._finished = sorted(self._finished + ended, key=lambda text: -text.score)[:width]
        self.is_done = not going_on or (len(self._finished) == width and not self._can_improve(going_on[0]))
        self.beams = [] if self.is_done else going_on
        return self.beams

    def _can_improve(self, best: Beam) -> bool:
        """True if a text that continues the best live beam may yet be among the ``beam_width`` best."""
        params = self.params
        if params.early_stopping is True:
            return False
        patient = params.early_stopping == "never" and params.length_penalty > 0.0
        length = self._max_tokens if patient else self._length
        return self._score(best.cumulative_logprob, length) > self._finished[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return float(np.float32(cumulative_logprob) / np.float32(length**self.params.length_penalty))


def likely_tokens(logits: Tensor, counts: Sequence[int]) -> list[Candidates | None]:
    """The most likely tokens after each row.

    Args:
        logits: ``[M, V]``, any float dtype.
        counts: M numbers, how many of each row.

    Returns:
        M entries; None for a row that allows no choice: a NaN, +inf, or every token at -inf.
    """
    ids, values = (tensor.cpu().numpy() for tensor in top_logprobs(logits, max(counts)))
    # A row of log-softmax holds NaN either nowhere or everywhere.
    return [None if np.isnan(values[i, 0]) else (ids[i, :count], values[i, :count]) for i, count in enumerate(counts)]
