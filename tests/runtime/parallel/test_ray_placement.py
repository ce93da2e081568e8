"""Where ranks are placed in a Ray cluster, and what is said where they cannot be; Ray itself stands aside."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from fake_ray import HERE, PLACED, FakeRay

from torch_pagoda.runtime.parallel.ray_placement import PLACEMENT, RayPlacement, hand_on, join_ray


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica of a fleet, and what is set here is gone at the end."""
    for name in (PLACEMENT, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_rank_0_is_here_and_ranks_of_one_host_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(["c", "a", "c", "b", "a"]).install(monkeypatch)
    placement = RayPlacement(5, {"CPU": 2})
    assert ray.asked == [([{"CPU": 2}] * 5, "PACK", [{"ray.io/node-id": HERE}, {}, {}, {}, {}])]
    assert placement.bundles == [0, 2, 1, 4, 3] and placement.resources == {"CPU": 2}
    placement.close()
    assert ray.removed == [ray.group]


def test_ranks_of_a_replica_take_the_places_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are its own to give back, and as large as it asked for."""
    ray = FakeRay([HERE, "a"]).install(monkeypatch)
    hand_on()
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:1" and os.environ[PLACEMENT] == PLACED.hex()
    placement = RayPlacement(2, {"CPU": 2})
    assert placement.group is ray.group and placement.resources == {"CPU": 3}
    placement.close()
    assert not ray.asked and not ray.removed


def test_what_found_no_place_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay().install(monkeypatch)
    with pytest.raises(ValueError, match=r"2 ranks need 4 CPU each, .* has 2 CPU at this host; nothing of it free"):
        RayPlacement(2, {"CPU": 4})
    assert ray.removed == [ray.group]


def test_a_client_of_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay([HERE, HERE]).install(monkeypatch)
    ray.is_client = True
    with pytest.raises(
        ValueError, match=r"this process is a client of one \(ray://\); run it on a host of the cluster"
    ):
        RayPlacement(2, {"CPU": 1})
    assert not ray.asked


@pytest.mark.parametrize("works", [True, False])
def test_sigterm_does_what_it_did(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    joined: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        joined.append(options)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not works:
            raise ConnectionError("no\n  cluster")

    ray = FakeRay().install(monkeypatch)
    ray.init, ray.is_initialized, ray.__version__ = init, lambda: False, "2.61.1"  # type: ignore[attr-defined]
    try:
        if works:
            join_ray("auto", log_to_driver=False)
        else:
            told = "Ray on this host cannot be used: no cluster; start it with 'ray start --head', of the version"
            with pytest.raises(ValueError, match=re.escape(told)):
                join_ray("auto", log_to_driver=False)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
    assert joined == [{"address": "auto", "configure_logging": False, "log_to_driver": False}]
