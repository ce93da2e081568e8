"""How the tests are spread over processes, and what each of these may take of the machine."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from torch_pagoda.npu_tools.torch_build import cuda_conflict

MOST_WORKERS = 8
"""Each takes more than a GiB of memory."""

# Torch imports an installed torch_npu by itself; beside a build for CUDA that ends the process without a word.
AUTOLOADED = util.find_spec("torch_npu") is not None and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
if AUTOLOADED and (conflict := cuda_conflict(metadata.version("torch"))):
    raise pytest.UsageError(conflict)

# A run says of the same sources what the run before said; ``--hypothesis-profile=default`` draws other examples.
# Nor does it depend on how busy the machine is.
settings.register_profile(
    "reproducible", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("reproducible")

# Torch collects garbage behind everything that it compiles: a tenth of the time of tests that compile.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a worker for each core: more threads and compiling processes would only take turns with them, and
    # threads that wait awake would take the time of those that work. Torch, which is imported later, reads this.
    # What is to run on several threads takes ``two_threads``.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for each core; none where only files or tests are named or output is to be seen (``-s``)."""
    named = [Path(config.invocation_params.dir, argument.split("::")[0]) for argument in config.args]
    if config.option.capture == "no" or all(path.is_file() for path in named):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


class ByGroup(LoadScopeScheduling):
    """Hands out groups of tests, each to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        from tiers import group_of

        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByGroup | None:
    return ByGroup(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_finish() -> None:
    """Collect garbage less often, and never look at what is imported by now; else it takes an eighth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Work is shared out among threads, whatever the process has by default."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
