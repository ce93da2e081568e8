"""Freed memory stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from torch_pagoda.runtime.memory import keep_freed_memory

FAULTS = """
import resource, torch
from torch_pagoda.runtime.memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.zeros(16 << 20, dtype=torch.uint8).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
torch.zeros(40 << 20, dtype=torch.uint8)
before = faults()
assert keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how another C library behaves is not ours to set")
def test_pages_are_cleared_once():
    """Each of 8 tensors of 4,096 pages, again and again."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    found = subprocess.run([sys.executable, "-c", FAULTS], env=clean, capture_output=True, text=True, check=True)
    before, after = map(int, found.stdout.split())
    assert after < 4096 < before


def test_the_environment_has_the_last_word(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory.__wrapped__()
