"""A toy model that leaves its last rows behind, and a head over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from toy_state_program import VOCAB as STATE_VOCAB
from toy_state_program import ToyStateProgram, logits_of

from torch_pagoda.runtime.step_metadata import StepMetadata

from toy_program import VOCAB, ToyProgram


class TappedToy(ToyProgram):
    """Obeys ``runtime.program.TappedProgram``: its hidden rows are the logits of all tokens."""

    hidden: torch.Tensor | None = None

    def __init__(self, vocab_size: int = VOCAB) -> None:
        super().__init__(vocab_size=vocab_size, dtype=torch.float64)
        self.hidden_form = vocab_size, torch.float64

    def _forward(self, *step: torch.Tensor | Callable[..., torch.Tensor]) -> torch.Tensor:
        self.hidden = super()._forward(*step)  # type: ignore[arg-type]
        return self.hidden


class TappedStates(ToyStateProgram):
    """Likewise, with a state."""

    hidden: torch.Tensor | None = None
    hidden_form = STATE_VOCAB, torch.float64

    def _attend(self, step: StepMetadata, hashes: torch.Tensor) -> torch.Tensor:
        seen = super()._attend(step, hashes)
        self.hidden = logits_of(seen).double()
        return seen


class ToyHead(TappedToy):
    """Takes with a token the hidden row of the one before it."""

    def _embedded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super()._embedded(tokens, positions) + self.previous @ self._head

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        assert step.previous_hidden is not None
        self.previous = step.previous_hidden[0]
        return super().__call__(input_ids, position_ids, step)

    def dense_drafts(self, model: TappedToy | TappedStates, tokens: Sequence[int], count: int) -> list[int]:
        """What the head drafts behind tokens, without a cache."""
        ids = list(tokens)
        hidden = model.dense_logits(ids).double()
        self.previous = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        for _ in range(count):
            newest = self.dense_logits(ids)[-1:]
            ids.append(int(newest.argmax()))
            self.previous = torch.cat([self.previous, newest])
        return ids[len(tokens) :]
