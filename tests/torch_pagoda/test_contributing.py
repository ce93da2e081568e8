"""CONTRIBUTING.md and README name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:torch_pagoda|compiler|passes|runtime|tests|benchmarks|examples)/[\w./-]*)`")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_path_is_there(page):
    named = NAMED.findall((ROOT / page).read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
