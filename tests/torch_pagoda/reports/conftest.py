"""Models are compiled for each test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def compile_once() -> None:
    """Nothing is shared."""
