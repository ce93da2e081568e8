"""Checkpoints of tiny models for ranks in real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_models import build_tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of tiny checkpoints, each written once."""
    made: dict[str, Path] = {}

    def get(kind: str, **overrides: Any) -> Path:
        key = f"{kind}{sorted(overrides.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            build_tiny_model(kind, **overrides).save_pretrained(made[key])
        return made[key]

    return get


@pytest.fixture
def several_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than this machine has."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
