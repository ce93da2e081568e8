"""Fleets that join a cluster of ``ray start``: groups of ranks, autoscaling, a front that is killed; under ``serve
run`` prefill and decode apart, over a real Mooncake."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from fleets import PROMPTS, SIZES, alone, ask_each, ask_many, client_of, metric, plain, streamed
from ray_clusters import BIN, RayCluster, free_ports, started, wait_for

from served import MODEL, PATIENCE, Served

pytestmark = pytest.mark.fleet
pytest.importorskip("ray.serve", reason="a fleet needs Ray: pip install 'torch-pagoda[fleet]'")

MASTER = shutil.which("mooncake_master", path=f"{BIN}:{os.environ['PATH']}")
RANK = "ray::RayRank"
TOKENS = 80
"""Few: of two ranks on a busy machine, each step waits for both."""
AUTOSCALING = {
    **{"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4},  # the front's link is one of these
    **{"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 2, "metrics_interval_s": 1},
}


class Cluster:
    """Four nodes with two processors each, and Serve on them.

    Attributes:
        address: for ``--address``.
        port: of Serve's proxy.
        processes: see ``RayCluster``.
    """

    def __init__(self, cluster: RayCluster, port: int) -> None:
        self.address, self.processes, self.port = cluster.address, cluster.processes, port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self, path: str) -> str:
        """Text of a path; empty where nobody answers with 200."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as response:
                return str(response.read().decode())
        except (urllib.error.URLError, ConnectionError):
            return ""

    def figures(self, name: str) -> dict[str, float]:
        """Samples of a metric by the name of the engine."""
        found = metric(self.text("/metrics"), name)
        return {labels.partition('engine="')[2].partition('"')[0]: value for labels, value in found.items()}


@pytest.fixture(scope="module")
def cluster(ray_nodes: RayCluster) -> Iterator[Cluster]:
    (port,) = free_ports(1)
    start = ["start", "--address", ray_nodes.address, "--http-port", str(port), "--proxy-location", "HeadOnly"]
    subprocess.run([BIN / "serve", *start], check=True)
    yield Cluster(ray_nodes, port)


@pytest.fixture(scope="class")
def fleet(cluster: Cluster) -> Iterator[Served]:
    """One replica of two ranks, which become two under load; no node has room for a replica."""
    given = ("--autoscaling-config", json.dumps(AUTOSCALING), "-tp", "2", "--cpus-per-replica", "4")
    served = Served("--address", cluster.address, *given, *SIZES, command="fleet", port=cluster.port)
    yield served
    assert served.stop() == 0
    wait_for(lambda: not cluster.processes("ServeReplica:pagoda") + cluster.processes(RANK))
    assert cluster.processes("raylet")  # it is not the fleet's own


class TestRanks:
    def test_replicas_of_two_ranks_come_with_the_load_and_go(self, cluster: Cluster, fleet: Served) -> None:
        found = asyncio.run(ask_each(fleet.url, PROMPTS))
        assert [text for text, _ in found] == alone(PROMPTS)
        assert len(cluster.processes(RANK)) == 1
        expected = asyncio.run(ask_many(fleet.url, 2, TOKENS))

        async def ask_until_two() -> list[str]:
            """Let nine requests run at any time until two replicas answer; returns all texts."""
            texts: list[str] = []

            async def go_on(number: int) -> None:
                while len(await asyncio.to_thread(cluster.figures, "vllm:num_requests_running")) < 2:
                    texts.append(await plain(client, number % 2, TOKENS))
                texts.append(await plain(client, number % 2, TOKENS))

            async with client_of(fleet.url) as client:
                await asyncio.gather(*(go_on(number) for number in range(9)))
            return texts

        begin = time.monotonic()
        assert set(asyncio.run(ask_until_two())) == set(expected)
        print(f"\na second replica took requests after {time.monotonic() - begin:.0f} s of load")
        assert len(cluster.processes(RANK)) == 2
        begin = time.monotonic()
        wait_for(lambda: len(cluster.processes(RANK)) == 1)
        print(f"it was gone after {time.monotonic() - begin:.0f} s without load")
        assert asyncio.run(ask_many(fleet.url, 2, TOKENS)) == expected

    def test_a_rank_that_is_killed_is_started_again(self, cluster: Cluster, fleet: Served) -> None:
        engines, (rank,) = cluster.processes("cli.engine_process"), cluster.processes(RANK)
        before = asyncio.run(ask_many(fleet.url, 2, TOKENS))
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: cluster.processes(RANK) not in ([rank], []))
        assert asyncio.run(ask_many(fleet.url, 2, TOKENS)) == before
        assert cluster.processes("cli.engine_process") == engines

    def test_a_front_that_is_killed_ends_its_streams_and_another_finds_the_replicas(
        self, cluster: Cluster, fleet: Served
    ) -> None:
        before = asyncio.run(ask_many(fleet.url, 2, TOKENS))
        engines = cluster.processes("ServeReplica:pagoda:Engines")

        async def ask_and_kill() -> tuple[str, str | None]:
            async with client_of(fleet.url) as client:
                texts: list[str] = []
                stream = asyncio.create_task(streamed(client, 0, texts))
                while not texts:
                    await asyncio.sleep(0.01)
                (front,) = cluster.processes("ServeReplica:pagoda:Front")
                os.kill(front, signal.SIGKILL)
                return await stream

        text, error = asyncio.run(ask_and_kill())
        assert error
        assert text.startswith(before[0]) or before[0].startswith(text)
        begin = time.monotonic()
        wait_for(lambda: cluster.text("/health"))
        print(f"\nanother front served after {time.monotonic() - begin:.0f} s")
        assert asyncio.run(ask_many(fleet.url, 2, TOKENS)) == before
        assert cluster.processes("ServeReplica:pagoda:Engines") == engines


def test_another_address_than_that_of_the_clusters_serve_is_refused(cluster: Cluster) -> None:
    with pytest.raises(
        AssertionError, match=f"runs on this cluster already, on 127.0.0.1:{cluster.port}; give these"
    ):
        Served("--address", cluster.address, command="fleet", port=cluster.port - 1)


@pytest.fixture(scope="module")
def mooncake() -> Iterator[str]:
    if MASTER is None:
        pytest.skip("pip install mooncake-transfer-engine-non-cuda")
    (port,) = free_ports(1)
    argv = [MASTER, "--rpc_address=127.0.0.1", f"--port={port}", "--metrics_port=0"]
    with started(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        yield f"mooncake://127.0.0.1:{port}"


def test_prefill_and_decode_apart_under_serve_run(cluster: Cluster, mooncake: str) -> None:
    given = {
        **{"model": str(MODEL), "replicas": 1, "prefill_replicas": 1, "kv_store": mooncake, "kv_store_size": "64MiB"},
        **{"kv_store_wait": 30, "cpus_per_replica": 2, "verify": "off", "codegen": "none", "port": cluster.port},
        **{"max_model_len": 512, "block_size": 4, "dtype": "float32", "served_model_name": "tiny"},
        "prefill_tensor_parallel_size": 2,
    }
    arguments = [f"{name}={value}" for name, value in given.items()]
    run = ["run", "--address", cluster.address, "--name", "apart", "torch_pagoda.fleet:app", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started([str(BIN / "serve"), *run], end=signal.SIGINT, **quiet):  # which ends Serve, too
        wait_for(lambda: cluster.text("/metrics").count('block_size="4"') == 2)
        prompts = [f"{prompt} 1" for prompt in PROMPTS]
        expected = alone(prompts)
        found = asyncio.run(ask_each(cluster.url, prompts))
        assert [text for text, _ in found] == expected
        assert all(cached >= 8 for _, cached in found)
        hits = {"0": sum(cached for _, cached in found), "prefill-0": 0}
        wait_for(lambda: cluster.figures("vllm:prefix_cache_hits_total") == hits, PATIENCE)
        assert metric(cluster.text("/metrics"), "pagoda:kv_store_hits_total") == {"": hits["0"] / 4}
        assert len(cluster.processes("torch_pagoda.rank")) == 1
        (prefill,) = cluster.processes("ServeReplica:apart:Prefill")
        os.kill(prefill, signal.SIGKILL)
        others = [f"import {prompt}" for prompt in PROMPTS]
        assert [text for text, _ in asyncio.run(ask_each(cluster.url, others))] == alone(others)
