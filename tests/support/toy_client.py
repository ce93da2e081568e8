"""Engines of the toy program behind a socket, for tests of the server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from thread_client import ThreadClient

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.serving.engine_process.client import DeltaStream
from torch_pagoda.serving.engine_process.process_client import ProcessClient
from torch_pagoda.serving.engine_process.wire import Delta

from toy_program import ToyProgram, character_tokenizer

BYTES: Any = character_tokenizer()

TOY_ENGINE_ARGV = [sys.executable, str(Path(__file__).parent / "toy_engine_process.py")]
"""A command of an engine process that serves the toy program; see ``toy_engine_process``."""


class ClientLoop:
    """A client of an engine process, and the event loop that it lives in."""

    client: ProcessClient

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Any) -> Any:
        """The coroutine's result."""
        return self._runner.run(asyncio.wait_for(coroutine, 120))

    def close(self) -> None:
        """End the engine process, then the loop."""
        self.run(self.client.close())
        self._runner.close()


def toy_engine(program: ToyProgram | None = None, **options: Any) -> Engine:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **options}
    return Engine(program or ToyProgram(vocab_size=258), BYTES, **settings)


@asynccontextmanager
async def toy_client(engine: Engine, **worker_options: Any) -> AsyncIterator[ThreadClient]:
    """A client of the engine on a thread."""
    client = ThreadClient(engine, model="toy", **worker_options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def read_all(stream: DeltaStream) -> list[Delta]:
    """Everything that comes, delta by delta."""
    found = []
    while deltas := await stream.next():
        found += deltas
    return found


def merged(deltas: list[Delta]) -> dict[tuple[int, int], tuple[str, list[int], str | None]]:
    """Prompt and completion → text, token ids and reason of the end."""
    found: dict[tuple[int, int], tuple[str, list[int], str | None]] = {}
    for delta in deltas:
        key = delta.prompt_index, delta.index
        text, ids, reason = found.get(key, ("", [], None))
        assert reason is None, "a completion ends once"
        found[key] = text + delta.text, ids + delta.token_ids, delta.finish_reason
    return found
