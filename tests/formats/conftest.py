"""Packages that write quantized checkpoints, each in an environment of its own.

What cannot be installed is skipped with pip's reason. Environments are made once, in ``$TORCH_PAGODA_CACHE/formats``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_pagoda.runtime.private_folder import cache_folder

ROOT = Path(__file__).resolve().parents[2]
# Last: benchmarks/coverage.py must not hide the package of that name.
sys.path.append(str(ROOT / "benchmarks"))

from environments import CommandFailed, python_of  # noqa: E402

PROGRAMS = Path(__file__).with_name("programs")
PACKAGES = {
    "compressed-tensors": ["compressed-tensors==0.20.0", "safetensors", "numpy"],
}
RunWith = Callable[..., None]


@pytest.fixture(scope="session")
def run_with() -> RunWith:
    """``run_with(package, program, *arguments)`` runs a program of ``programs/`` by that package's Python."""

    def run(package: str, program: str, *arguments: object) -> None:
        # With the releases of the project, from the indexes that it was installed from.
        pins = [pin for pin in (ROOT / "constraints.txt").read_text().splitlines() if pin.startswith("torch==")]
        try:
            python = python_of(cache_folder() / "formats" / package, [*PACKAGES[package], *pins])
        except CommandFailed as error:
            pytest.skip(str(error))
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [str(python), "-I", str(PROGRAMS / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]

    return run
