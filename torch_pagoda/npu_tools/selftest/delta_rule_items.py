"""Items for models with gated delta rules: decays that an older kernel overflows on, and states after 2048 steps.

No step that a whole model is exercised by decays as fast as a trained one may, or decodes for so long: a state that
is rounded to bfloat16 in every step is off by a quarter after 2048 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...passes import TracedGraph
from ...passes.graph.custom_notes import custom_note
from ...passes.lower.npu.decode_states import STEP
from ...passes.lower.npu.delta_rule_probe import why_wrong
from ...runtime.ops.state.one_token import one_token_recurrence
from .device import Device
from .numbers import plain
from .worker import Items, Progress

STEPS = 2048
_LIMIT = 2**-8
"""Of a head's state, relative to its norm. Both sides read the same numbers."""
_DECAYS = (0.0, -5e-4, -1e-3, -3e-3, -1e-2, -1e-1)
_BETA, _KEY_HEADS, _DIM = 0.02, 2, 64
_OPERATORS = ("npu_chunk_gated_delta_rule", "npu_recurrent_gated_delta_rule")

Advance = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Query, key, value, beta, logarithms of decays and states → the states behind the token."""


def delta_rule_items(traced: TracedGraph, device: Device) -> Items:
    """The items of a lowered graph; none where it has no gated delta rule."""
    steps = [step for node in traced.graph.nodes if (step := custom_note(node, STEP)) is not None]
    if not any(step.get("l2norm_eps") is not None for step in steps):
        return {}
    decays = {f"{name} with decays of exp(-8)": partial(_strong_decays, name, device) for name in _OPERATORS}
    forms = {"the formula": by_formula, "npu_recurrent_gated_delta_rule": by_operator}
    drifts = {f"{STEPS} decode steps by {name}": partial(_drift, form, device) for name, form in forms.items()}
    return {**decays, **drifts}


def _strong_decays(name: str, device: Device, progress: Progress) -> dict[str, Any]:
    why_wrong.cache_clear()
    return {"wrong": device.run(lambda: why_wrong(name, str(device.torch_device))), "operator": name}


def by_formula(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """A step as graphs of GE take it."""
    read = torch.zeros(1, dtype=torch.int32, device=state.device)
    given = query.float(), key.float(), value.float(), g[None], beta[None]
    return one_token_recurrence(*given, state, read)[1]


def by_operator(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """A step as captured graphs take it."""
    one = torch.ones(1, dtype=torch.int32, device=state.device)
    where = {"actual_seq_lengths": one, "ssm_state_indices": one - 1}
    torch.ops.npu.npu_recurrent_gated_delta_rule(query, key, value, state, beta=beta, scale=1.0, g=g, **where)
    return state


def _drift(form: Advance, device: Device, progress: Progress) -> dict[str, Any]:
    """Compare states after many steps with those of the formula on the CPU."""
    generator, at = torch.Generator().manual_seed(0), device.torch_device
    expected = torch.randn(1, len(_DECAYS), _DIM, _DIM, generator=generator) / 2
    found, g = expected.clone().to(at), torch.tensor(_DECAYS)[None]
    beta = torch.full((1, len(_DECAYS)), _BETA).bfloat16()
    with torch.inference_mode():
        for _ in range(STEPS):
            rows = torch.randn(3, 1, len(_DECAYS), _DIM, generator=generator)
            query, key = torch.nn.functional.normalize(rows[:2, :, :_KEY_HEADS], dim=-1).bfloat16()
            given = query, key, rows[2].bfloat16(), beta, g
            expected = by_formula(*given, expected)
            q, k, v, b, decay = (x.to(at) for x in given)
            found = device.run(partial(form, q, k, v, b, decay, found))
    off = (found.cpu().float() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
    largest = float(off.nan_to_num(nan=torch.inf).max())
    reason = f"states are off by {largest:.2g} of their norm (limit {_LIMIT:g})" if largest > _LIMIT else ""
    return {"wrong": reason, "largest": plain(largest), "of_limit": plain(largest / _LIMIT)}
