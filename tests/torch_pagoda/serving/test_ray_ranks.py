"""Ranks that Ray places, on a real cluster of two nodes with one processor each: neither has room for both."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from fleets import PROMPTS, SIZES, alone, ask_each
from ray_clusters import RayCluster, free_ports, ray_cluster, wait_for

import torch_pagoda as pagoda
from torch_pagoda import SamplingParams
from torch_pagoda.runtime.parallel import ray_placement
from torch_pagoda.runtime.parallel.group import GroupFailed

from served import MODEL, Served

pytestmark = pytest.mark.fleet
ray = pytest.importorskip("ray", reason="Ray is missing: pip install 'torch-pagoda[fleet]'")

RANK = "ray::RayRank"
OPTIONS: dict[str, Any] = {
    **{"distributed_executor_backend": "ray", "dtype": "float32", "max_model_len": 512, "block_size": 4},
    **{"verify": "off", "codegen": "none"},
}
GREEDY = SamplingParams(max_tokens=24, temperature=0)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)

_LEADER = f"""
import torch_pagoda as pagoda
llm = pagoda.LLM({str(MODEL)!r}, tensor_parallel_size=2, **{OPTIONS!r})
print("ready", flush=True)
input()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(1, 1, has_token=False) as started:
        ray_placement.join_ray("auto", log_to_driver=False)
        wait_for(lambda: len(ray.nodes()) == 2, 30)
        yield started
        ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: RayCluster) -> Iterator[None]:
    """Neither processes nor reserved processors."""
    yield
    wait_for(lambda: not cluster.processes(RANK), 30)
    wait_for(lambda: ray.available_resources().get("CPU") == 2, 30)


def texts(llm: pagoda.LLM, params: SamplingParams = GREEDY) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("parts", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_texts_of_two_nodes_are_those_of_one_process(cluster: RayCluster, parts: dict[str, int]) -> None:
    with pagoda.LLM(str(MODEL), **parts, **OPTIONS) as llm:
        (rank,) = cluster.processes(RANK)
        assert cluster.processes(RANK, node=1) == [rank]  # this process's processor is that of the first node
        assert texts(llm) == alone(PROMPTS)
        assert llm.stats()["ranks"] == 2 and not ray.available_resources().get("CPU")


def test_a_command_prints_what_one_process_does(cluster: RayCluster) -> None:
    given = ["-tp", "2", "--distributed-executor-backend", "ray", "--dtype", "float32", "--max-tokens", "24"]
    command = [sys.executable, "-m", "torch_pagoda", "generate", str(MODEL), "--codegen", "none", "--verify", "off"]
    command += [*given, "--temperature", "0", "-p", PROMPTS[0]]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert alone(PROMPTS[:1])[0] in found.stdout and "Ray" not in found.stdout


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_is_killed_is_named_or_replaced(cluster: RayCluster, restarts: int) -> None:
    with pagoda.LLM(str(MODEL), tensor_parallel_size=2, worker_restarts=restarts, **OPTIONS) as llm:
        expected = texts(llm, LONG)
        (rank,) = cluster.processes(RANK)
        llm.submit(llm.tokenizer(PROMPTS[0]).input_ids, LONG)
        llm.step()
        os.kill(rank, signal.SIGKILL)
        outputs: list[Any] = []
        while llm.has_unfinished():
            outputs += llm.step()
        (completion,) = outputs[-1].outputs
        if restarts:
            assert completion.error is None and llm.tokenizer.decode(completion.token_ids) == expected[0]
            assert cluster.processes(RANK, node=1) != [rank] and texts(llm, LONG) == expected
        else:
            assert completion.error is not None and completion.error.startswith(f"rank 1 (pid {rank}, host ")
            assert "ended: " in completion.error and "died" in completion.error


def test_one_that_is_killed_while_nothing_runs_is_noticed(cluster: RayCluster) -> None:
    with pagoda.LLM(str(MODEL), tensor_parallel_size=2, worker_restarts=0, **OPTIONS) as llm:
        (rank,) = cluster.processes(RANK)
        os.kill(rank, signal.SIGKILL)
        program: Any = llm.runner.program
        failure = wait_for(lambda: program.failure)
        assert f"rank 1 (pid {rank}, host " in str(failure)


def test_ranks_end_with_rank_0(cluster: RayCluster) -> None:
    leader = subprocess.Popen([sys.executable, "-c", _LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert leader.stdout is not None and leader.stdout.readline() == b"ready\n"
    assert cluster.processes(RANK)
    leader.kill()
    leader.communicate()


def test_what_the_cluster_has_not_got_is_refused(monkeypatch: pytest.MonkeyPatch, cluster: RayCluster) -> None:
    monkeypatch.setattr(ray_placement, "PLACE_SECONDS", 1.0)
    there = r"the cluster has 1 CPU at this host, 1 CPU at [\d.]+; 2 CPU of it free"
    with pytest.raises(ValueError, match=f"3 ranks need 1 CPU each.* within 1 s; {there}; add hosts"):
        pagoda.LLM(str(MODEL), tensor_parallel_size=3, **OPTIONS)


def test_another_version_on_a_host_is_refused(monkeypatch: pytest.MonkeyPatch, cluster: RayCluster) -> None:
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "torch-pagoda" else found(name))
    with pytest.raises(GroupFailed, match=r"rank 1 has another version of torch-pagoda than rank 0: '.*', not '9.9'"):
        pagoda.LLM(str(MODEL), tensor_parallel_size=2, **OPTIONS)


def test_a_host_without_a_module_is_named(monkeypatch: pytest.MonkeyPatch, cluster: RayCluster) -> None:
    """Ray's processes do not know the folder of the tests' own modules."""
    monkeypatch.setattr("torch_pagoda.runtime.parallel.ray_ranks.RayRank", Absent)
    with pytest.raises(GroupFailed, match=r"rank 1 was not started by Ray: ModuleNotFoundError: No module named '"):
        pagoda.LLM(str(MODEL), tensor_parallel_size=2, **OPTIONS)


class Absent:
    def begin(self) -> None: ...


def test_a_fleet_whose_replica_fits_no_node(cluster: RayCluster) -> None:
    """Its ranks are placed one by one; one that is killed is started again, and answers go on."""
    (port,) = free_ports(1)
    served = Served("--address", cluster.address, "-tp", "2", *SIZES, command="fleet", port=port)
    try:
        assert [text for text, _ in asyncio.run(ask_each(served.url, PROMPTS))] == alone(PROMPTS)
        (rank,) = cluster.processes(RANK)
        (engine,) = cluster.processes("cli.engine_process")
        nodes = [i for i in range(2) for mark in (RANK, "cli.engine_process") if cluster.processes(mark, node=i)]
        assert nodes == [0, 1]
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: cluster.processes(RANK) not in ([rank], []))
        assert [text for text, _ in asyncio.run(ask_each(served.url, PROMPTS))] == alone(PROMPTS)
        assert cluster.processes("cli.engine_process") == [engine] and psutil.pid_exists(engine)
    finally:
        assert served.stop() == 0
    wait_for(lambda: not cluster.processes("cli.engine_process"))
