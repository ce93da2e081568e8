"""Tests marked ``torchair`` need a Python that was started with the offline Ascend toolchain; this starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from _pytest.mark.expression import Expression

from torch_pagoda.compiler.store.program_store import DISABLE
from torch_pagoda.compiler.targets.npu.offline.run import is_offline, run_python
from torch_pagoda.compiler.targets.npu.offline.toolchain import ToolchainError, set_up_toolchain

# What a test compiles shall be of the sources that it tests, all of it, every time.
os.environ[DISABLE] = "1"

if is_offline():
    # Before any test module defines operators of its namespace, which would abort the process.
    import torch_npu  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the same command in such a Python where only tests marked ``torchair`` are asked for."""
    if is_offline() or config.option.help or config.option.version or not _only_torchair(config.option.markexpr):
        return None
    config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
    try:
        toolchain = set_up_toolchain(lambda step: print(f"{step} …", flush=True))
    except ToolchainError as error:
        raise pytest.UsageError(str(error)) from None
    return run_python(["-m", "pytest", *config.invocation_params.args], toolchain)


@pytest.fixture(scope="session", autouse=True)
def shared_graphs() -> Iterator[None]:
    """What is traced of a model is traced once in a process, for all tests that compile an equal one."""
    if "torch_pagoda.compiler.build" not in sys.modules:  # nothing that was collected compiles
        yield
        return
    from shared_graphs import share_graphs

    with pytest.MonkeyPatch.context() as patch:
        share_graphs(patch)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not is_offline() and item.get_closest_marker("torchair"):
        pytest.fail("needs the offline Ascend toolchain; run such tests by themselves: pytest -m torchair", False)


def _only_torchair(expression: str) -> bool:
    if not expression:
        return False
    compiled = Expression.compile(expression)
    return compiled.evaluate(lambda name, **_: name == "torchair") and not compiled.evaluate(lambda name, **_: False)
