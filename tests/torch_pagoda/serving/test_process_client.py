"""An engine in a process of its own: how it dies, and what becomes of those who wait for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from torch_pagoda.runtime.restart_limit import RestartLimit
from torch_pagoda.serving.app import make_app
from torch_pagoda.serving.engine_process.client import EngineDied, EngineUnavailable
from torch_pagoda.serving.engine_process.process_client import ProcessClient
from torch_pagoda.serving.engine_process.supervisor import EngineProcess
from torch_pagoda.serving.engine_process.wire import Start, Submit
from torch_pagoda.serving.settings import Settings

from toy_client import TOY_ENGINE_ARGV, ClientLoop, merged, read_all

FAKE = """
import socket, sys
from msgspec.msgpack import encode
from torch_pagoda.serving.engine_process.wire import *
sock = socket.socket(fileno=int(sys.argv[1]))
sock.recv(999)  # what it is told to load
def send(frame): sock.sendall(len(frame).to_bytes(4, "big") + frame)
hello = Hello(WIRE_VERSION, 8, 8, 1, None, {}, "fake", "cpu", {"steps": 1, "running": 1})
"""
"""The beginning of an engine that takes no time to load; what follows it is how it behaves."""

SERVES = FAKE + "send(encode(hello))\nwhile sock.recv(9): pass"


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 30
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"{[pid for pid in pids if alive(pid)]} are still there"
        time.sleep(0.02)


def fake_client(code: str, **options: Any) -> ProcessClient:
    return ProcessClient([sys.executable, "-c", code], Start("fake", None, {}), **options)


def run(coroutine: Any) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(bounded())


class Served(ClientLoop):
    """A client of the toy program in a process, and the loop that it lives in."""

    def __init__(self) -> None:
        super().__init__()
        self.client = self.run(self._start())

    async def _start(self) -> ProcessClient:
        options = {"step_seconds": 0.005}
        client = ProcessClient(TOY_ENGINE_ARGV, Start("toy", None, options), restarts=RestartLimit(2))
        await client.start()
        assert client.state == "loading"
        with pytest.raises(EngineUnavailable):
            client.submit(Submit("r", [[1]], {}))
        with pytest.raises(EngineUnavailable):
            assert client.hello
        await client.wait_ready()
        return client


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with closing(Served()) as served:
        yield served


def test_deltas_come_through(served: Served) -> None:
    client = served.client
    assert client.state == "ready" and client.hello.model == "toy" and client.pid is not None

    async def use() -> None:
        found = merged(await read_all(client.submit(Submit("r", [[1], [2]], {"max_tokens": 5, "n": 2}))))
        assert {(len(ids), reason) for _, ids, reason in found.values()} == {(5, "length")} and len(found) == 4
        assert await client.ask("ping") is None

    served.run(use())


def test_signals_to_end_are_left_to_the_front(served: Served) -> None:
    client = served.client
    assert client.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(client.pid, number)
    assert os.getsid(client.pid) == client.pid != os.getsid(0)
    served.run(client.ask("ping"))


def test_an_engine_that_was_stopped_for_a_moment_goes_on(served: Served) -> None:
    client = served.client

    async def use() -> None:
        assert client.pid is not None
        stream = client.submit(Submit("r", [[1]], {"max_tokens": 100}))
        deltas = await stream.next()
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await client.ask("ping", timeout=0.3)
        assert client.seconds_since_heard > 0.2 and client.state == "ready"
        os.kill(client.pid, signal.SIGCONT)
        deltas += await read_all(stream)
        assert len(merged(deltas)[0, 0][1]) == 100
        assert client.seconds_since_heard == 0

    served.run(use())


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_lost_engine_is_started_again_and_counts_on(served: Served, number: signal.Signals) -> None:
    client = served.client

    async def use() -> None:
        first = client.pid
        assert first is not None
        await read_all(client.submit(Submit("a", [[1]], {"max_tokens": 7})))
        stats = await client.ask("stats")
        while client.stats["generated_tokens"] < stats["generated_tokens"]:
            await asyncio.sleep(0.01)
        before = dict(client.stats)
        stream = client.submit(Submit("r", [[1], [2]], {"max_tokens": 120}))
        waiting = client.submit(Submit("s", [[1]], {"max_tokens": 120}))
        await stream.next()
        question = asyncio.ensure_future(client.ask("ping"))
        os.kill(first, number)
        with pytest.raises(EngineDied):
            await read_all(stream)
        with pytest.raises(EngineDied):
            await read_all(waiting)
        with pytest.raises(EngineUnavailable):
            await question
        assert client.state == "loading" and client.stats["running"] == 0
        with pytest.raises(EngineUnavailable, match="loading"):
            client.submit(Submit("t", [[1]], {}))
        await client.wait_ready()
        assert client.pid != first and client.stats["restarts"] == before["restarts"] + 1
        assert all(client.stats[name] >= before[name] for name in ("steps", "generated_tokens", "finished_length"))
        await read_all(client.submit(Submit("r", [[1]], {"max_tokens": 7})))
        while client.stats["finished_length"] == before["finished_length"]:
            await asyncio.sleep(0.01)
        assert client.stats["generated_tokens"] >= before["generated_tokens"] + 7
        wait_until_gone(first)

    served.run(use())


def test_health_is_503_until_the_engine_is_warm(tmp_path: Path) -> None:
    """Warm-up is a part of making the engine, and that of saying hello."""
    warm = tmp_path / "warm"

    async def use() -> None:
        client = ProcessClient(TOY_ENGINE_ARGV, Start("toy", None, {"warm_when": str(warm)}))
        app = make_app(Settings(served_model_names=("toy",)), client, None)
        await client.start()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            await asyncio.sleep(1.0)
            for path in ("/health", "/ready"):
                assert (await http.get(path)).status_code == 503
            warm.touch()
            await client.wait_ready()
            assert (await http.get("/health")).status_code == 200
        await client.close()
        app.state.front.close()

    run(use())


def test_a_front_that_is_killed_leaves_no_engine() -> None:
    code = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from toy_client import TOY_ENGINE_ARGV
from torch_pagoda.serving.engine_process.process_client import ProcessClient
from torch_pagoda.serving.engine_process.wire import Start, Submit
async def main():
    client = ProcessClient(TOY_ENGINE_ARGV, Start("toy", None, {"step_seconds": 0.01}))
    await client.start()
    await client.wait_ready()
    stream = client.submit(Submit("r", [[1]], {"max_tokens": 120}))
    await stream.next()
    print(client.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    support = str(Path(TOY_ENGINE_ARGV[1]).parent)
    with subprocess.Popen([sys.executable, "-c", code, support], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = int(front.stdout.readline())
        assert alive(engine)
        front.kill()
    wait_until_gone(engine)


def test_so_many_restarts_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        client = fake_client(SERVES, restarts=RestartLimit(2))
        await client.start()
        for i in range(3):
            await client.wait_ready()
            assert client.stats == {"steps": i + 1, "running": 1, "restarts": i}
            assert client.pid is not None
            pid = client.pid
            os.kill(pid, signal.SIGKILL)
            while client.state == "ready":
                await asyncio.sleep(0.01)
        await client.wait_dead()
        with pytest.raises(EngineDied):
            await client.wait_ready()
        with pytest.raises(EngineUnavailable) as caught:
            client.submit(Submit("r", [[1]], {}))
        assert caught.value.state == "dead"
        with pytest.raises(EngineUnavailable):
            await client.ask("ping")
        assert client.stats == {"steps": 3, "running": 0, "restarts": 2}
        await client.close()

    run(use())
    assert "is not restarted" in caplog.text


def test_restarts_are_counted_in_a_stretch_of_time() -> None:
    now = 0.0
    limit = RestartLimit(3, 600, clock=lambda: now)
    assert [limit.allows_one() for _ in range(4)] == [True, True, True, False]
    now = 599.0
    assert not limit.allows_one()
    now = 600.0
    assert limit.allows_one()
    assert not RestartLimit(0).allows_one()


@pytest.mark.parametrize(
    "behavior",
    [
        "sys.exit(3)",
        "sock.sendall(b'garbage, which is not a frame')\nsock.recv(9)",
        "sock.sendall(b'\\xff' * 8)\nsock.recv(9)",
        "send(b'garbage')\nsock.recv(9)",
        "send(encode(Step(1.0)))\nsock.recv(9)",
        "send(encode(Hello(WIRE_VERSION + 1, 8, 8, 1, None, {}, '', '', {})))\nsock.recv(9)",
        "import time\nsend(b'')\ntime.sleep(100)",
        "import time\ntime.sleep(100)",
    ],
)
def test_an_engine_that_is_never_ready_is_not_started_again(behavior: str, caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        client = fake_client(FAKE + behavior, load_seconds=3.0, end_seconds=0.1)
        await client.start()
        pid = client.pid
        assert pid is not None
        with pytest.raises(EngineDied):
            await client.wait_ready()
        assert client.state == "dead" and client.stats["restarts"] == 0
        wait_until_gone(pid)
        await client.close()

    run(use())
    assert "is not restarted" in caplog.text


@pytest.mark.parametrize(
    "news",
    [
        b"\xc1",
        b"\x93\xa4step\xa1x\x90",  # a time that is text
        b"\x93\xa4step\x01\x91\x91\xa1r",  # a delta that is cut short
        b"\x92\xa6answer\x01",
    ],
)
def test_nonsense_from_an_engine_ends_it(news: bytes) -> None:
    async def use() -> None:
        client = fake_client(FAKE + f"send(encode(hello))\nsock.recv(99)\nsend({news!r})\nsock.recv(9)")
        client._restarts = RestartLimit(0)
        await client.start()
        await client.wait_ready()
        with pytest.raises(EngineDied, match="an invalid message"):
            await client.submit(Submit("r", [[1]], {})).next()
        await client.wait_dead()

    run(use())


def test_deltas_that_nobody_asked_for_are_passed_over() -> None:
    answers = """
send(encode(hello))
sock.recv(99)
times = RequestTimes(0, 0, 0, 1, 0)
deltas = [Delta("x", 0, 0, "x", []), Delta("r", 0, 0, "a", [1], finish_reason="stop", times=times)]
send(encode(Step(1.0, [*deltas, Delta("r", 0, 0, "b", [])], [Refused("y", "invalid", "")], [Answer(77)])))
sock.recv(9)
"""

    async def use() -> None:
        client = fake_client(FAKE + answers)
        await client.start()
        await client.wait_ready()
        found = merged(await read_all(client.submit(Submit("r", [[1]], {}))))
        assert found == {(0, 0): ("a", [1], "stop")}
        await client.close()
        assert client.state == "dead"

    run(use())


def test_an_engine_that_does_not_end_is_killed_with_its_children() -> None:
    code = FAKE + (
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "hello = Hello(WIRE_VERSION, 8, 8, 1, None, {}, str(child.pid), 'cpu', {})\n"
        "send(encode(hello))\ntime.sleep(100)"
    )

    async def use() -> None:
        client = fake_client(code, end_seconds=0.1)
        await client.start()
        hello = await client.wait_ready()
        pid = client.pid
        assert pid is not None and client.pid is not None
        await client.close()
        wait_until_gone(pid, int(hello.model))

    run(use())


def test_an_end_is_noticed_though_a_child_holds_the_socket() -> None:
    code = FAKE + (
        "import os, time\n"
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(100)\n"
        "send(encode(Hello(WIRE_VERSION, 8, 8, 1, None, {}, str(child), 'cpu', {})))\nsock.recv(99)\nos._exit(1)"
    )

    async def use() -> None:
        client = fake_client(code, restarts=RestartLimit(0))
        await client.start()
        child = int((await client.wait_ready()).model)
        with pytest.raises(EngineDied):
            await client.submit(Submit("r", [[1]], {})).next()
        await client.wait_dead()
        wait_until_gone(child)

    run(use())


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(OSError):
        EngineProcess(["/no/such/command"])

    async def use() -> None:
        with pytest.raises(OSError):
            await ProcessClient(["/no/such/command"], Start("", None, {})).start()

    run(use())
