"""Captured tiny models for tests that compare ranks with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torch_pagoda.compiler.capture.trace import Captured, capture
from torch_pagoda.compiler.verify.self_check import Reference, reference_of_model

from tiny_models import build_tiny_model


@pytest.fixture(scope="module")
def captured() -> Callable[..., tuple[Captured, Reference]]:
    """Captured tiny models with their logits, each made once."""
    made: dict[str, tuple[Captured, Reference]] = {}

    def get(kind: str, **overrides: Any) -> tuple[Captured, Reference]:
        key = f"{kind}{sorted(overrides.items())}"
        if key not in made:
            model = build_tiny_model(kind, **overrides)
            made[key] = capture(model), reference_of_model(model)
        return made[key]

    return get
