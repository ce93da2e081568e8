"""Tests of the engine run in both modes: with each step settled before the next is planned, and one step ahead."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.runtime.engine import engine_base
from torch_pagoda.runtime.engine.engine_options import EngineOptions

SYNCHRONOUS, AHEAD = "synchronous", "ahead"

ONE_MODE = {
    "test_model_runner",
    "test_step_sizes",
    "test_submission",
    "test_look_ahead",
    "test_look_ahead_machine",
    "test_pipelined",
}
"""Modules that make no engine, or choose its mode."""

LONG = {
    *("test_scarce_blocks_change_no_token", "test_no_policy_changes_a_token"),
    *("test_random_moves_growth_and_cancels_change_no_token", "test_beams_branch_without_copies"),
    *("test_an_interrupted_step_loses_nothing", "test_an_interrupted_step_loses_and_repeats_no_piece"),
}
"""Tests of many seconds, which run ahead only with the slow ones."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in ONE_MODE:
        return
    ahead = pytest.param(AHEAD, marks=[pytest.mark.slow] if metafunc.function.__name__ in LONG else [])
    metafunc.parametrize("scheduling", [SYNCHRONOUS, ahead], indirect=True)


@pytest.fixture(autouse=True)
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mode of the engines that the test makes."""
    mode = getattr(request, "param", SYNCHRONOUS)
    if mode == AHEAD:

        def options(**given: Any) -> EngineOptions:
            return EngineOptions(**{"async_scheduling": True, **given})

        monkeypatch.setattr(engine_base, "EngineOptions", options)
    return str(mode)
