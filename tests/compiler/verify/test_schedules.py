"""Schedules of the self-check: how many rows are judged together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from torch_pagoda.compiler.build import build_unpacked
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.verify.self_check import (
    MODEL_SCHEDULE,
    SHORT_SCHEDULE,
    STATE_SCHEDULE,
    Schedule,
    check,
    planned_steps,
    reference_of_model,
)

from tiny_models import build_tiny_model


@pytest.mark.parametrize(
    ("model_type", "schedule"),
    [("llama", MODEL_SCHEDULE), ("llama", SHORT_SCHEDULE), ("mamba2", STATE_SCHEDULE), ("mamba2", SHORT_SCHEDULE)],
)
def test_a_row_that_a_router_changed_is_not_judged_alone(model_type: str, schedule: Schedule) -> None:
    """Half of the rows of a group have to be right, where that is what a model in half precision can show."""
    model = build_tiny_model(model_type)
    reference = reference_of_model(model, schedule)
    program = build_unpacked(model, CompileOptions(codegen="none"), reference=reference).program
    rows = Counter[int]()
    for step in planned_steps(program, reference):
        program(step.input_ids, step.position_ids, step.metadata)
        rows[step.group] += len(step.expected)
    assert min(rows.values()) >= 3
    changed = [logits.clone() for logits in reference.logits]
    changed[0][-1] = torch.randn_like(changed[0][-1])  # the last row decodes
    assert check(program, replace(reference, logits=changed, share=0.5)).ok
    assert not check(program, replace(reference, logits=changed, share=1.0)).ok
