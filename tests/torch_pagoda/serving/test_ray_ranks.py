"""Ranks that Ray places, on a real cluster none of whose nodes has room for two of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fleets import PROMPTS, alone
from ray_clusters import RayCluster, wait_for

pytestmark = pytest.mark.fleet
pytest.importorskip("ray", reason="Ray is missing: pip install 'torch-pagoda[fleet]'")

SCRIPT = Path(__file__).parents[2] / "support" / "ray_leader.py"
RANK = "ray::RayRank"


class Leader:
    """A process that is rank 0, see ``ray_leader``.

    Args:
        cluster: of the others.
        name: of its function.
    """

    def __init__(self, cluster: RayCluster, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), name],
            env={**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdin is not None and self.process.stdout is not None
        while (line := self.process.stdout.readline()) and not line.startswith("{"):
            pass  # Ray's own words of a process that has died
        return dict(json.loads(line))

    def goes_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def leader(cluster: RayCluster, name: str) -> Iterator[Leader]:
    """Rank 0, which is killed at the end; the others end with it."""
    one = Leader(cluster, name)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()
        wait_for(lambda: not cluster.processes(RANK), 30)


def test_a_rank_that_is_killed_is_replaced_or_named(ray_nodes: RayCluster) -> None:
    with leader(ray_nodes, "ranks") as first:
        found = first.says()
        assert found["texts"] == alone(PROMPTS)
        assert ray_nodes.processes(RANK) == found["pids"] and len(found["pids"]) == 1
        assert found["nodes"][0] == found["here"] != found["nodes"][1]
        first.goes_on()
        replaced = first.says()
        assert replaced["is_exact"] and replaced["texts"] == found["texts"]
        assert ray_nodes.processes(RANK) == replaced["pids"] != found["pids"]
        first.goes_on()
        named = first.says()
        assert named["killed"] == replaced["pids"]
        assert named["error"].startswith(f"rank 1 (pid {named['killed'][0]}, host ")
        assert "ended: The actor is dead because its worker process has died" in named["error"]
        assert not ray_nodes.processes(RANK)


def test_what_cannot_work_is_refused_and_stages_serve(ray_nodes: RayCluster) -> None:
    with leader(ray_nodes, "refusals_and_stages") as first:
        found = first.says()
        assert found["too_many"].startswith("5 ranks need 2 CPU each, one of them on this host, and Ray did not find")
        assert "within 1 s; the cluster has 2 CPU at " in found["too_many"]
        assert found["too_many"].count("2 CPU at this host") == 1
        assert "; 8 CPU of it free; add hosts, " in found["too_many"]
        assert found["absent"].startswith("rank 1 was not started by Ray: ModuleNotFoundError: No module named '")
        assert found["other_version"].startswith("rank 1 has another version of torch-pagoda than rank 0: ")
        assert not ray_nodes.processes(RANK)
        first.goes_on()
        stages = first.says()
        assert stages["texts"] == alone(PROMPTS)
        assert ray_nodes.processes(RANK) == stages["pids"]
