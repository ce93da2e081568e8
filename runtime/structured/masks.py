"""Masks of the tokens that grammars allow next, one row per completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .state import CANNOT_GO_ON, GrammarState
from .vocabulary import Mask, load_llguidance


class MaskPool:
    """Room for masks that is used again in every step, and the threads that fill it."""

    def __init__(self) -> None:
        self._room: npt.NDArray[np.uint32] = np.empty((0, 0), np.uint32)
        self._executor: tuple[int, Any] | None = None

    def fill(self, states: Sequence[GrammarState], holds_eos: Sequence[bool]) -> torch.Tensor:
        """Compute the mask of each state; ``error`` is set where that took too much work.

        Args:
            states: of one vocabulary, none of them finished. A token that ends the text may come only where that
                completes the grammar.
            holds_eos: for each: end-of-sequence tokens may not come as long as anything else may.

        Returns:
            ``[S, ceil(V / 32)]`` int32 on the CPU, valid until the next call; bit ``i % 32`` of word ``i // 32``:
            token i may come. Rows of states with an error hold no bit.
        """
        masks = self._rows(len(states), states[0].grammar.vocabulary.num_words)
        self._compute([(state.matcher, i) for i, state in enumerate(states) if not state.is_waiting], masks)
        for state, mask in zip(states, masks, strict=True):
            if state.is_waiting:
                mask[:] = state.waiting_mask
                continue
            if state.matcher.is_error():
                state.error = state.trouble()
                mask[:] = 0
                continue
            vocabulary = state.grammar.vocabulary
            if not _hold_back_ends(state, mask):
                state.error = f"{CANNOT_GO_ON} (it wants text behind a token that ends the text)"
                continue
            if (digits := state.digits_left) is not None:
                _narrow(mask[None], vocabulary.without_digits(digits))
        # A row of zeros stays as it is.
        if all(holds_eos):
            _narrow(masks, states[0].grammar.vocabulary.not_eos)
        elif any(holds_eos):
            held = np.flatnonzero(holds_eos)
            masks[held] = _narrow(masks[held], states[0].grammar.vocabulary.not_eos)
        return torch.from_numpy(masks.view(np.int32))

    def _compute(self, matchers: list[tuple[Any, int]], masks: npt.NDArray[np.uint32]) -> None:
        """Write the mask of each matcher into the row beside it."""
        threads = torch.get_num_threads()
        row_bytes = masks.shape[1] * masks.itemsize
        if len(matchers) <= 1 or threads == 1:
            first = masks.ctypes.data
            for matcher, i in matchers:
                matcher.unsafe_compute_mask_ptr(first + i * row_bytes, row_bytes)
            return
        if self._executor is None or self._executor[0] != threads:
            self._executor = (threads, load_llguidance().LLExecutor(num_threads=threads))
        self._executor[1].unsafe_compute_mask_ptr(matchers, masks.ctypes.data, row_bytes, len(masks))

    def _rows(self, count: int, words: int) -> npt.NDArray[np.uint32]:
        if self._room.shape[0] < count or self._room.shape[1] != words:
            self._room = np.empty((count, words), np.uint32)
        return self._room[:count]


def _hold_back_ends(state: GrammarState, mask: Mask) -> bool:
    """Take out tokens that end the text before the grammar is complete; returns whether any token is left."""
    is_cut = False
    for token in state.grammar.vocabulary.eos_token_ids:
        word, bit = token // 32, np.uint32(1 << token % 32)
        if mask[word] & bit and not state.may_end_with(token):
            mask[word] &= ~bit
            is_cut = True
    return not is_cut or bool(mask.any())


def _narrow(masks: Mask, to: Mask) -> Mask:
    """Leave of each row what is in ``to``, too, or all of it if nothing is; returns the rows."""
    both = masks & to
    np.copyto(masks, both, where=both.any(axis=1, keepdims=True))
    return masks
