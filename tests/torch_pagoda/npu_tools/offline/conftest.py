"""Models are compiled for each test, and every schedule is held against the graph as it was."""

from __future__ import annotations

import pytest
from placed_schedules import check_every_schedule


@pytest.fixture(autouse=True)
def checked_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_schedule(monkeypatch)


@pytest.fixture(autouse=True)
def compile_once() -> None:
    """Nothing is shared."""
