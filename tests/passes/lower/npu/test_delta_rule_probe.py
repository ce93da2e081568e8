"""The probe of the gated delta rule's operators: right kernels pass, and those that are known to be wrong do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_pagoda.passes.lower.npu.delta_rule_probe import why_wrong

CHUNKED, RECURRENT = "npu_chunk_gated_delta_rule", "npu_recurrent_gated_delta_rule"


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    why_wrong.cache_clear()
    yield
    why_wrong.cache_clear()


@pytest.mark.parametrize("name", [CHUNKED, RECURRENT])
def test_the_reference_kernels_are_right(name: str) -> None:
    assert why_wrong(name, "cpu") == ""


def dividing_exponentials(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As older kernels over chunks of 64: decays between tokens are quotients of exponentials of sums."""
    first, results, states = 0, [], []
    for count, state in zip(given["actual_seq_lengths"].tolist(), given["initial_state"].float(), strict=True):
        for start in range(first, first + count, 64):
            rows = slice(start, min(start + 64, first + count))
            q, k = (x[rows].float().repeat_interleave(2, 1).transpose(0, 1) for x in (query, key))  # [H, L, N]
            v, beta = value[rows].float().transpose(0, 1), given["beta"][rows].float().t()[..., None]
            sums = given["g"][rows].t().cumsum(1).exp()[..., None]
            between = (sums / sums.mT).tril()
            a = (beta * (k @ k.mT) * between).tril(-1) + torch.eye(k.shape[1])
            u = torch.linalg.solve_triangular(a, beta * (v - sums * (k @ state.mT)), upper=False)
            results.append(given["scale"] * (sums * (q @ state.mT) + ((q @ k.mT) * between) @ u).transpose(0, 1))
            state = state * sums[:, -1:] + (u * (sums[:, -1:] / sums)).mT @ k
        states.append(state)
        first += count
    return torch.cat(results).to(value.dtype), torch.stack(states).to(given["initial_state"].dtype)


def test_strong_decays_tell_the_older_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.npu, CHUNKED, dividing_exponentials)
    assert "down to exp(-8): results are off by inf" in why_wrong(CHUNKED, "cpu")


def test_decays_within_the_documented_range_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is the decays that the kernel above is refused for."""
    monkeypatch.setattr(torch.ops.npu, CHUNKED, dividing_exponentials)
    monkeypatch.setattr("torch_pagoda.passes.lower.npu.delta_rule_probe._STRONGEST", -0.5)
    monkeypatch.setattr(torch, "tensor", _weakened(torch.tensor))
    assert why_wrong(CHUNKED, "cpu") == ""


def _weakened(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda given, **options: make([max(x, -0.5) for x in given], **options)


def test_states_that_are_rounded_to_bfloat16_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(torch.ops.npu, RECURRENT)

    def rounding(query: Any, key: Any, value: Any, state: torch.Tensor, **given: Any) -> torch.Tensor:
        result: torch.Tensor = right(query, key, value, state, **given)
        state.copy_(state.bfloat16())
        return result

    monkeypatch.setattr(torch.ops.npu, RECURRENT, rounding)
    assert "states by 0.00" in why_wrong(RECURRENT, "cpu")


def test_an_operator_that_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("aclnnChunkGatedDeltaRule is not in this release\nstack")

    monkeypatch.setattr(torch.ops.npu, CHUNKED, refuse)
    assert why_wrong(CHUNKED, "cpu").endswith("it refuses it: aclnnChunkGatedDeltaRule is not in this release")
    assert "npu_chunk_gated_delta_rule is not used" in caplog.text
