"""The profile run: the largest step is run, and what it takes is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.planning import measured_activations
from torch_pagoda.runtime.planning.measured_activations import measure_activations
from torch_pagoda.runtime.step_metadata import StepMetadata

from toy_program import ToyProgram

MIB = 2**20


class HungryProgram(ToyProgram):
    """Takes ``per_token`` bytes for each token of a step while it runs."""

    per_token = 0

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        scratch = torch.ones(self.per_token * input_ids.shape[1] + 1, dtype=torch.uint8)
        logits = super().__call__(input_ids, position_ids, step)
        return logits + scratch[-1] - 1


def test_what_the_largest_step_takes_is_seen() -> None:
    program = HungryProgram()
    program.per_token = MIB
    found = measure_activations(program, 100, 4, block_size=8)
    assert (found.num_tokens, found.num_seqs) == (100, 4)
    # Pages that earlier work left to the process need not be asked for again.
    assert 95 * MIB <= found.peak_bytes < 130 * MIB


def test_memory_of_earlier_steps_does_not_count() -> None:
    program = HungryProgram()
    program.per_token = 2 * MIB
    measure_activations(program, 100, 4)
    program.per_token = 0
    assert measure_activations(program, 100, 4).peak_bytes < 30 * MIB


@pytest.mark.parametrize(
    ("tokens", "seqs", "expected"),
    [
        (100, 4, (100, 4)),
        (3, 8, (3, 3)),
        (130, 1, (128, 1)),  # no sequence is longer than the model allows
    ],
)
def test_the_step_is_as_large_as_the_limits_let_it_be(tokens: int, seqs: int, expected: tuple[int, int]) -> None:
    program = ToyProgram(max_model_len=128)
    found = measure_activations(program, tokens, seqs, block_size=8)
    assert (found.num_tokens, found.num_seqs) == expected
    assert program.steps[-1] == (*expected, expected[1])


def test_the_step_is_one_that_an_engine_would_run() -> None:
    program = ToyProgram()
    measured: list[torch.Tensor] = []
    program.change_logits = lambda logits, tokens: measured.append(logits) or logits  # type: ignore[func-returns-value]
    measure_activations(program, 50, 3, block_size=8)
    # 17 + 17 + 16 tokens of id 0, each sequence by itself.
    alone = torch.stack([program.dense_logits([0] * count)[-1] for count in (17, 17, 16)])
    torch.testing.assert_close(measured[-1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_kv", [True, False])
def test_the_step_of_a_model_with_state_gives_each_sequence_a_slot(with_kv: bool) -> None:
    program = ToyStateProgram(with_kv=with_kv)
    assert measure_activations(program, 20, 3, block_size=8).num_seqs == 3
    assert program.mistakes == [] and program.steps == [(1, 1), (20, 3)]


def test_a_system_that_does_not_tell_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured_activations, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with pytest.raises(RuntimeError, match="cannot be read"):
        measure_activations(ToyProgram(), 8, 2)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs"])
def test_sizes_below_one_are_refused(name: str) -> None:
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 2, name: 0}
    with pytest.raises(ValueError, match=f"{name}=0"):
        measure_activations(ToyProgram(), **limits)
