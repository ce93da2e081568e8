"""Which tests run: those of the tiers asked for, of the shard asked for.

Tests marked ``torchair`` need a Python that was started with the offline Ascend toolchain; this starts it. Tests
marked ``cuda`` need a CUDA device; if they alone are asked for and there is none, this says so.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression

from torch_pagoda.compiler.targets.npu.without_device import is_offline
from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.npu_tools.offline.run import run_python
from torch_pagoda.npu_tools.offline.toolchain import ToolchainError, set_up_toolchain
from torch_pagoda.runtime.cache import kv_cache

from tiers import OWN, TESTS, TIERS, left_to_grid, shard_of, tier_of, tier_of_file

# What a test compiles shall be of the sources that it tests, all of it, every time.
os.environ[DISABLE] = "1"
FILLED_CACHE_BYTES = 1 << 24
"""The largest cache tensor that ``fill_cache`` writes: larger ones would take time and memory."""
NO_CUDA = f"tests marked cuda need a CUDA device, and torch {torch.__version__} finds none"

if is_offline():
    # Before any test module defines operators of its namespace, which would abort the process.
    import torch_npu  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="k/N", type=_shard, help="run the k-th of N parts of the tests selected")


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shard; use k/N with k from 1 to N")
    return int(found[1]), int(found[2])


def fill_cache(storage: torch.Tensor, advise: Callable[[torch.Tensor], bool] = kv_cache.advise_huge_pages) -> bool:
    """Fill a new tensor of a cache with NaN, or the largest integer: reading what nobody wrote shows."""
    if storage.device.type == "cpu" and storage.nbytes <= FILLED_CACHE_BYTES:
        storage.fill_(float("nan") if storage.is_floating_point() else torch.iinfo(storage.dtype).max)
    return advise(storage)


kv_cache.advise_huge_pages = fill_cache  # ``allocate_kv_cache`` calls it for each tensor


def pytest_configure(config: pytest.Config) -> None:
    """Where only files or tests are named, all of them run that need nothing more than the default run does."""
    named = [Path(config.invocation_params.dir, argument.split("::")[0]) for argument in config.args]
    if config.option.markexpr == "quick" and all(path.is_file() for path in named):
        config.option.markexpr = " or ".join(TIERS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that have no test of the tiers asked for."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    asked = set(re.findall(r"\w+", config.option.markexpr)) - {"or"}
    if not asked or not asked <= {*TIERS}:
        return None
    tier = tier_of_file(collection_path)
    return True if tier is not None and tier not in asked else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, before ``-m`` selects, and leave the ones of the shard."""
    quick = []
    for item in items:
        if not any(item.get_closest_marker(name) for name in OWN):
            tier = tier_of(item.nodeid.removeprefix(f"{TESTS.name}/"))
            if tier == "quick":
                quick.append(item)
            else:
                item.add_marker(tier)
    left = left_to_grid(quick)
    for item in quick:
        item.add_marker("grid" if item in left else "quick")
    if config.option.shard is not None:
        shard, shards = config.option.shard
        chosen = [item for item in items if shard_of(item.nodeid, shards) == shard]
        config.hook.pytest_deselected(items=[item for item in items if shard_of(item.nodeid, shards) != shard])
        items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Where only tests marked ``torchair`` are asked for, run the same command in such a Python. Where only those
    marked ``cuda`` are, and there is no device, say so.
    """
    if config.option.help or config.option.version:
        return None
    if config.option.markexpr == "cuda" and not torch.cuda.is_available():
        print(f"no tests ran: {NO_CUDA}")
        return pytest.ExitCode.NO_TESTS_COLLECTED
    if is_offline() or not _only_torchair(config.option.markexpr):
        return None
    config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
    try:
        toolchain = set_up_toolchain(lambda step: print(f"{step} …", flush=True))
    except ToolchainError as error:
        raise pytest.UsageError(str(error)) from None
    return run_python(["-m", "pytest", *config.invocation_params.args], toolchain)


@pytest.fixture(scope="session", autouse=True)
def shared_graphs(pytestconfig: pytest.Config) -> Iterator[None]:
    """What is traced of a model is traced once, for all tests that compile an equal one and for later runs."""
    if "torch_pagoda.compiler.build" not in sys.modules:  # nothing that was collected compiles
        yield
        return
    from graphs_on_disk import GraphsOnDisk
    from shared_graphs import share_graphs

    cache = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    with pytest.MonkeyPatch.context() as patch:
        share_graphs(patch, cache and GraphsOnDisk(cache.mkdir("graphs")))
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not is_offline() and item.get_closest_marker("torchair"):
        pytest.fail("needs the offline Ascend toolchain; run such tests by themselves: pytest -m torchair", False)
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip(NO_CUDA)


def _only_torchair(expression: str) -> bool:
    if not expression:
        return False
    compiled = Expression.compile(expression)
    return compiled.evaluate(lambda name, **_: name == "torchair") and not compiled.evaluate(lambda name, **_: False)
