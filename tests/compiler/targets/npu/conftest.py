"""Every graph that gets a schedule here is held against what it was before."""

from __future__ import annotations

import pytest
from placed_schedules import check_every_schedule


@pytest.fixture(autouse=True)
def checked_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_schedule(monkeypatch)
