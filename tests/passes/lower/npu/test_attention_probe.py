"""The call of attention that a device is tried with before a graph has its form, and what lowering does then."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch

from torch_pagoda.passes.lower.npu.attention.attention_form import AttentionForm
from torch_pagoda.passes.lower.npu.attention.attention_probe import why_wrong
from torch_pagoda.passes.lower.npu.attention.attention_routes import Heads
from torch_pagoda.passes.lower.npu.attention.paged_attention import lower_npu_paged_attention
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu import attention
from torch_pagoda.runtime.ops.npu.attention_core import AttentionCall, attend

from npu_graphs import AttentionGraph, operators, refusals

Kernel: TypeAlias = Callable[[AttentionCall], tuple[torch.Tensor, torch.Tensor]]
REFUSED = "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], None]]:
    """Gives the stand-in for a device, the CPU, another kernel."""
    why_wrong.cache_clear()
    yield lambda kernel: monkeypatch.setattr(attention, "attend", kernel)
    why_wrong.cache_clear()


def form(layout: str = "TND", dim: int = 256, window: int = 0, sinks: bool = False) -> AttentionForm:
    return AttentionForm(layout, Heads(4, 2, dim, dim), dim**-0.5, window, 128, torch.bfloat16, sinks)


@pytest.mark.parametrize(
    "tried", [form(), form(dim=64, window=512, sinks=True), form("BSH", 512), form("BSH", 96, 1024)]
)
def test_a_right_kernel_passes(tried: AttentionForm) -> None:
    assert why_wrong(tried, "cpu") == ""


def first_key(call: AttentionCall) -> Any:
    """What a kernel makes of the compressed mask that takes its first row for a mask of the keys."""
    return attend(
        dataclasses.replace(call, sparse_mode=0, atten_mask=None, kv_lengths=[1] * len(call.kv_lengths or ()))
    )


def no_window(call: AttentionCall) -> Any:
    return attend(dataclasses.replace(call, sparse_mode=3))


def nan(call: AttentionCall) -> Any:
    result, lse = attend(call)
    result.view(-1)[0] = torch.nan
    return result, lse


def refuses(call: AttentionCall) -> Any:
    raise RuntimeError(f"{REFUSED}\nmore of it")


@pytest.mark.parametrize("kernel", [first_key, no_window, nan, refuses])
def test_a_wrong_kernel_does_not(stand_in: Callable[[Kernel], None], kernel: Kernel) -> None:
    stand_in(kernel)
    for layout in ("TND", "BSH"):
        reason = why_wrong(form(layout, 128, window=1024), "cpu")
        expected = f"it refuses it: {REFUSED}" if kernel is refuses else "its numbers are off by"
        assert f"the device was tried with one call: {expected}" in reason and "more" not in reason


@pytest.mark.parametrize("wrong", [("TND",), ("TND", "BSH")], ids=str)
def test_lowering_takes_the_next_form_by_name(
    stand_in: Callable[[Kernel], None], wrong: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(lambda call: (refuses if call.input_layout in wrong else attend)(call))
    graph = AttentionGraph(4, 2, 256, sliding_window=9, target=NpuTarget(tried_on="cpu"))
    with caplog.at_level(logging.WARNING):
        record = lower_npu_paged_attention(graph.traced)
    assert "attention in layout TND with heads of 256 and a window of 9 is not used: the device was" in caplog.text
    assert REFUSED in refusals(record)
    layouts = [node.kwargs["input_layout"] for node in graph.traced.graph.nodes if "input_layout" in node.kwargs]
    assert layouts == ([] if "BSH" in wrong else ["BSH"]), operators(graph.traced)
    stand_in(attend)
    steps = [[30, 1, 17], [1, 9, 0], [1, 1, 1]]
    expected = AttentionGraph(4, 2, 256, sliding_window=9).run(steps)
    for found, right in zip(graph.run(steps), expected, strict=True):
        torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)


def test_nothing_is_tried_without_a_device(stand_in: Callable[[Kernel], None]) -> None:
    stand_in(refuses)
    graph = AttentionGraph(4, 2, 256)
    assert refusals(lower_npu_paged_attention(graph.traced)) == ""
