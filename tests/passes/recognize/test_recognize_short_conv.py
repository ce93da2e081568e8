"""Convolutions and shifts along the tokens that models spell out: spellings, near misses, numbers in shared steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.self_check import STATE_SCHEDULE, check, reference_of_model
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.proof.token_axis import mixers
from torch_pagoda.passes.recognize import short_conv, token_shift
from torch_pagoda.passes.recognize.short_conv import recognize_short_conv
from torch_pagoda.passes.recognize.token_shift import recognize_token_shift
from torch_pagoda.runtime.program import StateSpec

from toy_lm import DYNAMO_PASSES, HIDDEN, ToyLM, sdpa, traced

Mixer = Callable[[ToyLM, torch.Tensor, torch.Tensor], torch.Tensor]


def depthwise(m: ToyLM, taps: int = 4) -> torch.Tensor:
    return m.position_table[:taps].T[:, None] * 0.5


def grouped(m: ToyLM, groups: int, taps: int) -> torch.Tensor:
    per_group = HIDDEN // groups
    rows = per_group * taps
    return m.position_table[100 : 100 + rows].reshape(HIDDEN, per_group, taps) / per_group**0.5


def pad_in_front(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    x = F.pad(h.transpose(1, 2), (3, 0))
    return h + F.silu(F.conv1d(x, depthwise(m), m.position_table[9], groups=HIDDEN)).transpose(1, 2)


def pad_and_cut(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    x = F.conv1d(h.transpose(1, 2), depthwise(m), None, padding=3, groups=HIDDEN)
    return h + x[..., : h.shape[1]].transpose(1, 2)


def in_groups(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    x = F.pad(h.transpose(1, 2), (2, 0))
    return h + F.conv1d(x, grouped(m, 4, 3), m.position_table[9], groups=4).transpose(1, 2)


def in_groups_and_cut(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    x = F.conv1d(h.transpose(1, 2), grouped(m, 2, 2), m.position_table[9], padding=1, groups=2)
    return h + x[:, :, : h.shape[1]].transpose(1, 2)


def chain_of_two(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Zaya's: what the second convolution meets in front of a sequence is the bias of the first."""
    x = F.pad(h.transpose(1, 2), (2, 0))
    x = F.conv1d(x, depthwise(m, 2), m.position_table[9], groups=HIDDEN)
    return h + F.conv1d(x, grouped(m, 4, 2), m.position_table[10], groups=4).transpose(1, 2)


def chain_of_three(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    x = F.pad(h.transpose(1, 2), (5, 0))
    x = F.conv1d(x, grouped(m, 8, 3), m.position_table[9], groups=8)
    x = F.conv1d(x, depthwise(m, 3), m.position_table[10], groups=HIDDEN)
    return h + F.conv1d(x, grouped(m, 2, 2), None, groups=2).transpose(1, 2)


def shift_behind_a_row(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    first = m.q(m.position_table[None, 5:6])
    return h + torch.cat([first, m.q(h)[:, :-1]], dim=1)


def shift_by_padding(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return h + F.pad(m.q(h), (0, 0, 1, -1))


SPELLINGS: dict[Mixer, tuple[int, list[int]]] = {
    pad_in_front: (1, [3]),
    pad_and_cut: (1, [3]),
    in_groups: (1, [2, 1]),
    in_groups_and_cut: (1, [1]),
    chain_of_two: (1, [1, 1]),
    chain_of_three: (1, [2, 1, 2, 1, 1]),
    shift_behind_a_row: (1, [1]),
    shift_by_padding: (1, [1]),
}
"""What is written → matches, and tokens that each state holds."""


def passed(before: Mixer) -> tuple[ToyLM, TracedGraph, list[Any]]:
    model = ToyLM(sdpa, before=before)
    graph = traced(model)
    return model, graph, [entry.apply(graph) for entry in DYNAMO_PASSES]


@pytest.mark.parametrize("before", SPELLINGS)
def test_spellings(before: Mixer) -> None:
    matches, kept = SPELLINGS[before]
    model, graph, records = passed(before)
    ours = [r for r in records if r.name in ("recognize_short_conv", "recognize_token_shift")]
    assert sum(r.matches for r in ours) == matches and not any(r.rejections for r in ours)
    states = [spec for spec in graph.caches if isinstance(spec, StateSpec)]
    assert [spec.shape for spec in states] == [(n, HIDDEN) for n in kept]
    assert mixers(graph) == []
    assert recognize_short_conv(graph).matches == recognize_token_shift(graph).matches == 0
    graph.recompile()
    verdict = check(link(graph, graph.module), reference_of_model(model, STATE_SCHEDULE))
    assert verdict.ok and verdict.error < 1e-3, verdict


def test_a_call_of_the_users_own_is_left_alone() -> None:
    graph = traced(ToyLM(sdpa, before=chain_of_two))
    graph.paged = False
    assert recognize_short_conv(graph).matches == recognize_token_shift(graph).matches == 0


def reasons(before: Mixer) -> list[str]:
    """Of the recognizers, and of the proof, which refuses what they have left alone."""
    _, graph, records = passed(before)
    ours = [r for r in records if r.name in ("recognize_short_conv", "recognize_token_shift")]
    assert not any(r.matches for r in ours)
    assert mixers(graph)
    return [rejection.reason for record in ours for rejection in record.rejections]


@pytest.mark.parametrize(
    ("convolve", "reason"),
    [
        (lambda x, w: F.conv1d(F.pad(x, (6, 0)), w, groups=HIDDEN, dilation=2), "dilation 2"),
        (lambda x, w: F.conv1d(F.pad(x, (2, 1)), w, groups=HIDDEN), "pad(2, 1) in front of convolutions"),
        (lambda x, w: F.conv1d(F.pad(x, (3, 0), value=1.0), w, groups=HIDDEN), "pad(3, 0) in front"),
        (lambda x, w: F.conv1d(x, w, padding="same", groups=HIDDEN), "padding same"),
        (lambda x, w: F.conv1d(F.pad(x, (3, 0), mode="replicate"), w, groups=HIDDEN), "pad(3, 0) in front"),
        (lambda x, w: F.conv1d(x, w, padding=3, groups=HIDDEN)[..., 3:], "not those of a causal convolution"),
        (lambda x, w: F.conv1d(F.pad(x, (8, 0)), w.repeat(1, 1, 3)[..., :9], groups=HIDDEN), "over 9 tokens"),
    ],
)
def test_other_convolutions(convolve: Callable[..., torch.Tensor], reason: str) -> None:
    def before(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return h + convolve(h.transpose(1, 2), depthwise(m)).transpose(1, 2)

    assert any(reason in found for found in reasons(before)), reasons(before)


@pytest.mark.parametrize(
    ("shift", "reason"),
    [
        (lambda h: torch.cat([h[:, :1], h[:, :-1]], dim=1), "depends on the tokens"),
        (lambda h: torch.cat([h[:, :1] * 0, h[:, 1:]], dim=1), "depends on the tokens"),
        (lambda h: torch.cat([h.new_zeros(1, 1, HIDDEN), h[:, 1:]], dim=1), "does not pass every row"),
        (lambda h: torch.cat([h[:, 1:], h.new_zeros(1, 1, HIDDEN)], dim=1), None),
        (lambda h: F.pad(h, (0, 0, -1, 1)), None),
        (lambda h: F.pad(h, (0, 0, 1, -1), value=2.0), "gets constant 2.0"),
        (lambda h: h.flip(1), None),
    ],
)
def test_other_shifts(shift: Callable[[torch.Tensor], torch.Tensor], reason: str | None) -> None:
    found = reasons(lambda m, h, pos: h + shift(h))
    assert found == [] if reason is None else any(reason in r for r in found), found


def test_mistakes_are_noticed_where_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rewritten place is run beside what it was, on random numbers."""
    delayed = short_conv.insert_delayed
    monkeypatch.setattr(short_conv, "_of_front", lambda *args: None)  # zeros, not the first one's bias
    assert "its results are not those of a causal convolution" in reasons(chain_of_two)
    monkeypatch.undo()
    monkeypatch.setattr(short_conv, "insert_delayed", lambda traced, rows, by, first: delayed(traced, rows, 2, first))
    assert "its results are not those of a causal convolution" in reasons(in_groups_and_cut)
    monkeypatch.undo()
    monkeypatch.setattr(
        token_shift, "insert_delayed", lambda traced, rows, by, first: delayed(traced, rows, by, None)
    )
    assert "it does not pass every row to the next token" in reasons(shift_behind_a_row)
