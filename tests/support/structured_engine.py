"""Engines for tests of structured output: a model without attention, whose steps cost next to nothing."""

from __future__ import annotations

from typing import Any

import torch

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.step_metadata import StepMetadata

from toy_program import ToyProgram, character_tokenizer

EOS = 256
VOCAB = 258


class BigramProgram(ToyProgram):
    """Random weights; a token's logits follow from it and its position alone."""

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        tokens = input_ids[0]
        if self.before_call is not None:
            self.before_call(tokens)
        rows = step.logits_rows
        x = self._embedding[tokens[rows]] + self._positions[position_ids[0][rows]]
        logits = x @ self._head.T
        return logits if self.change_logits is None else self.change_logits(logits, tokens[rows])


def structured_engine(program: ToyProgram | None = None, **options: Any) -> Engine:
    """An engine over bytes as tokens, with an end-of-sequence token."""
    program = BigramProgram(vocab_size=VOCAB, max_model_len=1000) if program is None else program
    sizes = {"block_size": 16, "num_blocks": 2048, "max_num_seqs": 64, **options}
    return Engine(program, character_tokenizer(), eos_token_ids=[EOS], **sizes)  # type: ignore[arg-type]
