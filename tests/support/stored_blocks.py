"""Engines over toy programs that share a store of blocks, and stores that fail."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch_pagoda.runtime.block_store import traffic as traffic_module
from torch_pagoda.runtime.block_store.store import BlockStore
from torch_pagoda.runtime.engine import core
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

FINGERPRINT = b"0123456789abcdef"


@contextmanager
def patience() -> Iterator[None]:
    """Wait for stores however loaded the machine is."""
    longer = {"_STALLED_SECONDS": 60.0, "_DRAIN_SECONDS": 60.0}
    with mock.patch.multiple(traffic_module, **longer), mock.patch.object(core, "_STORE_SECONDS", 60.0):
        yield


def store_engine(program: Any, folder: Path, **options: Any) -> Engine:
    """An engine that waits for its blocks and stores all. What no store has written reads as NaN."""
    settings: dict[str, Any] = {
        **{"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "kv_store": f"folder://{folder}"},
        **{"kv_store_wait": 30.0, "kv_store_write": "all", "swap_space": 1 << 20, "fingerprint": FINGERPRINT},
        **options,
    }
    engine = Engine(program, **settings)
    for memory in traffic(engine)._reader._parts.__self__._bytes:
        memory.fill_(0xFF)
    return engine


def traffic(engine: Engine) -> Any:
    return engine._core.state.traffic


def answers(engine: Engine, prompts: Sequence[list[int]], count: int = 6, **terms: Any) -> list[list[int]]:
    outputs = generate(engine, prompts, count, **terms)
    return [output.outputs[0].token_ids for output in outputs]


def generate(engine: Engine, prompts: Sequence[list[int]], count: int = 6, **terms: Any) -> list[RequestOutput]:
    return engine.generate(list(prompts), SamplingParams(temperature=0, max_tokens=count), **terms)


def cached(engine: Engine, prompts: Sequence[list[int]], **terms: Any) -> list[int]:
    return [output.num_cached_tokens for output in generate(engine, prompts, **terms)]


class FailingStore:
    """A store in front of another that lies, is late, damages what it returns, loses what it is given, and raises.

    Args:
        inner: the store.
        seed: of what it does.
    """

    def __init__(self, inner: BlockStore, seed: int) -> None:
        self._inner, self._random = inner, random.Random(seed)

    @property
    def num_damaged(self) -> int:
        return self._inner.num_damaged

    def known(self, keys: Sequence[bytes]) -> list[bool]:
        self._fail()
        share = self._random.choice([0.0, 0.0, 0.1, 1.0])
        return [found or self._random.random() < share for found in self._inner.known(keys)]

    def load(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        self._fail()
        results = self._inner.load(keys, into)
        share = self._random.choice([0.0, 0.0, 0.1, 1.0])
        for i, part in enumerate(into):
            if self._random.random() < share:
                part[:] = bytes([self._random.randrange(256)]) * part.nbytes
                results[i] = False
        return results

    def store(self, keys: Sequence[bytes], parts: Sequence[memoryview]) -> int:
        self._fail()
        return self._inner.store(keys, parts) if self._random.random() < 0.8 else 0

    def close(self) -> None:
        self._inner.close()

    def _fail(self) -> None:
        if self._random.random() < 0.1:
            time.sleep(self._random.choice([0.001, 0.01]))
        if self._random.random() < 0.05:
            raise RuntimeError("a store that raises")
