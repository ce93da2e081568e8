"""An application around a fake engine, and clients of it in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray_clusters import RayCluster, ray_cluster
from transformers import AutoTokenizer

from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.settings import Settings

from described_answers import JudgingTransport
from fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples" / "tiny-pydoc"
CHATML = ROOT / "examples" / "chatml.jinja"


@pytest.fixture(autouse=True)
def compile_once() -> None:
    """Nothing is shared."""


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def engine(tokenizer: Any) -> FakeEngine:
    return FakeEngine(tokenizer)


Serve = Callable[..., Any]


@pytest.fixture
def serve(engine: FakeEngine, tokenizer: Any) -> Serve:
    """``async with serve(**settings) as client:`` a client of an application with the fake engine.

    Every answer is held against the application's own OpenAPI document.
    """

    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
        settings.setdefault("chat_template", CHATML.read_text())
        settings.setdefault("served_model_names", ("tiny", "alias"))
        extra = {name: settings.pop(name) for name in ("formats", "log") if name in settings}
        app = make_app(Settings(**settings), engine, tokenizer, **extra)
        transport = JudgingTransport(app, httpx.ASGITransport(app, raise_app_exceptions=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            client.front = app.state.front  # type: ignore[attr-defined]
            yield client
        app.state.front.close()

    return opened


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayCluster]:
    """A cluster of four nodes with two processors each."""
    with ray_cluster(2, 2, 2, 2) as cluster:
        yield cluster


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
