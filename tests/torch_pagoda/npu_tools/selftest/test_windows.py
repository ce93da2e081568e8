"""Attention around the windows of models, on a stand-in for a device that has its windows wrong."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import selftest_stand_in
import torch

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.verify.self_check import Schedule
from torch_pagoda.npu_tools.selftest import operators as operators_file
from torch_pagoda.npu_tools.selftest.answers import answers
from torch_pagoda.npu_tools.selftest.device import Device
from torch_pagoda.npu_tools.selftest.model import Asked
from torch_pagoda.npu_tools.selftest.operators import operator_items
from torch_pagoda.npu_tools.selftest.window_calls import window_calls
from torch_pagoda.runtime.ops.npu import OPERATORS
from torch_pagoda.runtime.ops.npu.registration import by_schema

from legal_models import build_legal_model
from shared_graphs import capture

ATTENTION = "npu_fused_infer_attention_score"
ASKED = Asked("nowhere", block_size=128)


def silent(found: dict[str, Any]) -> None:
    """Takes what an item says under way."""


def wider_by(tokens: int) -> Callable[[dict[str, Any]], None]:
    def change(given: dict[str, Any]) -> None:
        if given["sparse_mode"] == 4 and given["pre_tokens"] >= 256:
            given["pre_tokens"] += tokens

    return change


def without_mask(given: dict[str, Any]) -> None:
    if given["key_antiquant_mode"] == 5:
        given["atten_mask"] = None


@contextmanager
def device(change: Callable[[dict[str, Any]], None] | None = None) -> Iterator[Device]:
    """A stand-in that calls attention with other arguments than it is given."""
    running = selftest_stand_in._Running()
    ours = next(each for each in OPERATORS if each.name == ATTENTION)
    schema = getattr(torch.ops.npu, ATTENTION).default._schema
    kernel, parameters = by_schema(ours, ours.kernel, schema), schema.arguments
    library = torch.library.Library("npu", "IMPL")

    def bent(*args: Any, **kwargs: Any) -> Any:
        given = {each.name: each.default_value for each in parameters if each.has_default_value()}
        given |= dict(zip((each.name for each in parameters), args, strict=False)) | kwargs
        if running.now and change is not None:
            change(given)
        return kernel(**given)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one already
        library.impl(ATTENTION, bent, "CPU", allow_override=True)
    yield Device(torch.device("cpu"), "Ascend910B3", stand_in="a toy", running=running.entered)
    library._destroy()


def wrong(model: torch.nn.Module, asked: Asked, change: Callable[[dict[str, Any]], None] | None) -> dict[str, str]:
    """Call of attention → why it is wrong, or "" where it is right."""
    with device(change) as used:
        items = operator_items(model, used, asked)
        return {name: run(silent)["wrong"] for name, run in items.items() if name.startswith(f"{ATTENTION}(")}


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators_file, "SCHEDULE", Schedule((41, 9, 20), (19, 5, 6), 128, decoded=3))


def around(found: dict[str, str]) -> dict[str, str]:
    return {name: reason for name, reason in found.items() if " around a window of " in name}


@pytest.mark.parametrize(("model_type", "window"), [("gemma3_text", 512), ("mistral", 4096)], ids=str)
def test_windows_that_a_device_has_wrong_are_found_at_their_size(model_type: str, window: int) -> None:
    model = build_legal_model(model_type, window=window, dtype=torch.bfloat16)
    right = wrong(model, ASKED, None)
    assert not any(right.values())
    kinds = {name.split("), ")[1] for name in around(right)}
    assert kinds == {f"{kind} of 4 around a window of {window}, first" for kind in ("prompts", "decode")}
    for tokens in (1, -1, 1 << 20):
        found = wrong(model, ASKED, wider_by(tokens))
        assert all("differs by" in reason for reason in around(found).values())
        assert not any(reason for name, reason in found.items() if name not in around(found)), (
            "no other step shows it"
        )


def test_decode_steps_over_int8_caches_read_a_window_of_their_blocks() -> None:
    model = build_legal_model("mistral", window=1024, dtype=torch.bfloat16)
    asked = dataclasses.replace(ASKED, kv_cache_dtype="int8")
    assert not any(wrong(model, asked, None).values())
    found = wrong(model, asked, without_mask)
    assert {name.split("), ")[1] for name, reason in found.items() if reason} == {
        "decode of 4 around a window of 1024, first"
    }


def test_a_window_that_no_sequence_passes_has_no_calls() -> None:
    captured = capture(build_legal_model("mistral", window=4096, max_position_embeddings=4096))
    options = CompileOptions(codegen="none", target="npu", verify="off")
    assert not list(window_calls(run_pipeline(captured, options, None, CompileReport("mistral"))))


def test_the_question_about_windows_is_answered() -> None:
    item = f"{ATTENTION}(bfloat16[4, 4, 128]), decode of 4 around a window of 512, first"
    outcome = {"item": item, "status": "wrong", "reason": "result differs by 3", "found": {"of_limit": 7.0}}
    (answer,) = [each for each in answers({"operators": [outcome]}) if "window" in each["question"]]
    assert answer["status"] == "wrong" and answer["answer"].startswith("0 of 1 calls are right; the largest")
