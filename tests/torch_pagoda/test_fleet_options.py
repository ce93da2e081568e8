"""Options of ``pagoda fleet`` up to where Ray would start."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from torch_pagoda.fleet import app
from torch_pagoda.serving.fleet.plan import FleetPlan

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[FleetPlan]:
    """What would be deployed, on a cluster of 16 processors without a Ray."""
    made: list[FleetPlan] = []
    ray, deployments = ModuleType("ray"), ModuleType("torch_pagoda.serving.fleet.deployments")
    ray.cluster_resources = lambda: {"CPU": 16.0}  # type: ignore[attr-defined]
    ray.shutdown = lambda: None  # type: ignore[attr-defined]
    ray.serve = ModuleType("ray.serve")  # type: ignore[attr-defined]
    ray.serve.shutdown = lambda: None
    deployments.application = made.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", ray.serve)
    monkeypatch.setitem(sys.modules, deployments.__name__, deployments)
    monkeypatch.setattr(sys.modules["torch_pagoda.cli.fleet"], "_check_ray", lambda: None)
    return made


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "pagoda fleet needs ray; install them: pip install 'torch-pagoda[fleet]'"),
        ("2.59.1", "pagoda fleet needs Ray from 2.60 to below 2.62, and 2.59.1 is installed"),
        ("2.62.0", "and 2.62.0 is installed; install it: pip install 'torch-pagoda[fleet]'"),
    ],
)
def test_another_ray_is_refused_with_the_remedy(
    run: Run, monkeypatch: pytest.MonkeyPatch, version: str | None, message: str
) -> None:
    original = importlib.util.find_spec
    found = None if version is None else original("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "ray" else original(name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    status, out, err = run("fleet", "somewhere", "--replicas", "2")
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1


def test_arguments_of_serve_run_are_those_of_the_command(plans: list[FleetPlan]) -> None:
    app(
        {
            **{"model": "org/model", "replicas": "4", "tensor_parallel_size": 2, "api_key": ["a=k"]},
            **{"enable_prefix_caching": False, "autoscaling_config": {"max_replicas": 8}, "no_ui": "true"},
        }
    )
    (plan,) = plans
    assert (plan.model, plan.replicas, plan.cpus, plan.npus) == ("org/model", 4, 2.0, 0)
    assert plan.options["tensor_parallel_size"] == 2 and plan.options["enable_prefix_caching"] is False
    assert plan.autoscaling == {"max_replicas": 8} and not plan.settings.enable_ui
    assert [key.key for key in plan.settings.api_keys] == ["k"]
    assert plan.settings.max_queue == 4 * 64 * 8 and plan.options["max_queue"] == 4 * 64 * 8 + 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 2}, "model is missing"),
        ({"model": "m", "replica": 2}, "No such option: --replica"),
        ({"model": "m", "replicas": 0}, "replicas=0"),
        ({"model": "m", "cpus_per_replica": -1}, "cpus_per_replica=-1"),
        ({"model": "m", "autoscaling_config": {"min_replicas": 0}}, "min_replicas=0 is not supported"),
        ({"model": "m", "distributed_executor_backend": "external_launcher"}, "starts the ranks of a replica itself"),
        ({"model": "m", "log_format": "xml"}, "--log-format xml is not known"),
    ],
)
def test_wrong_arguments_are_refused(plans: list[FleetPlan], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        app(arguments)
    assert not plans


def test_more_replicas_than_a_host_has_processors_for_are_refused(
    run: Run, plans: list[FleetPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["torch_pagoda.cli.fleet"], "_join_ray", lambda address: True)
    status, out, err = run("fleet", "m", "--replicas", "17")
    assert (status, out, plans) == (2, "", [])
    assert "--replicas 17 with 1 processors each need 17, and this host has 16; lower --replicas" in err
