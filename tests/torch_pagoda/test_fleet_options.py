"""Options of ``pagoda fleet`` up to where Ray would start."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torch_pagoda.fleet import app
from torch_pagoda.serving.fleet.plan import FleetPlan

MODEL = Path(__file__).parents[2] / "examples" / "tiny-pydoc"
STORE = {"prefill_replicas": 1, "kv_store": "mooncake://host:50051"}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[FleetPlan]:
    """What would be deployed, on a cluster of 16 processors without a Ray."""
    made: list[FleetPlan] = []
    ray, deployments = ModuleType("ray"), ModuleType("torch_pagoda.serving.fleet.deployments")
    ray.cluster_resources = lambda: {"CPU": 16.0}  # type: ignore[attr-defined]
    ray.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 16.0}}]  # type: ignore[attr-defined]
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
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


def test_without_a_cluster_each_rank_gets_a_processor(
    plans: list[FleetPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    monkeypatch.delattr(sys.modules["ray"], "nodes")
    app({"model": "m", "replicas": 2, "tensor_parallel_size": 3})
    assert plans[0].cpus == 3


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
        ({"model": "m", "prefill_replicas": -1}, "prefill_replicas=-1"),
        ({"model": "m", "prefill_replicas": 1}, "--prefill-replicas 1 needs a store that all replicas reach"),
        ({"model": "m", "prefill_tensor_parallel_size": 2}, "needs --prefill-replicas; give both"),
        ({"model": str(MODEL.parent), **STORE}, "kv_store does not support model="),
    ],
)
def test_wrong_arguments_are_refused(plans: list[FleetPlan], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        app(arguments)
    assert not plans


def test_replicas_that_compute_prompts_store_all_and_the_others_wait_for_it(plans: list[FleetPlan]) -> None:
    app({"model": str(MODEL), **STORE, "replicas": 3, "autoscaling_config": {"max_replicas": 4}})
    app({"model": str(MODEL), **STORE, "kv_store_wait": 0.2, "cpus_per_replica": 2})
    first, second = plans
    assert first.prefill is not None and second.prefill is not None
    assert (first.replicas, first.prefill.replicas, first.prefill.autoscaling) == (3, 1, None)
    assert first.cpus == first.prefill.cpus == 16 // (4 + 1) and second.prefill.cpus == 2
    others = {name: value for name, value in first.options.items() if name != "kv_store_wait"}
    assert first.prefill.options == {**others, "kv_store_write": "all"}
    assert (first.options["kv_store_wait"], second.options["kv_store_wait"]) == (10.0, 0.2)


def hosts(monkeypatch: pytest.MonkeyPatch, *processors: float) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": each}} for each in processors]
    gone = {"Alive": False, "Resources": {"CPU": 99.0}}
    monkeypatch.setattr(sys.modules["ray"], "nodes", lambda: [*nodes, {"Alive": True, "Resources": {}}, gone])


@pytest.mark.parametrize(
    ("processors", "given", "expected"),
    [
        ((1, 1), {"tensor_parallel_size": 2}, (2, 2)),
        ((8, 8), {"tensor_parallel_size": 8}, (8, 0)),
        ((8, 4), {"tensor_parallel_size": 2, "pipeline_parallel_size": 8}, (16, 16)),
        ((12, 12), {"tensor_parallel_size": 3, "pipeline_parallel_size": 5}, (15, 15)),
        ((16, 16), {"tensor_parallel_size": 2, "replicas": 3}, (8, 0)),
        ((8, 8), {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, (16, 2)),
        ((8, 8), {"tensor_parallel_size": 2, "cpus_per_replica": 13}, (12, 2)),
        ((8, 8), {"tensor_parallel_size": 4, "cpus_per_replica": 2, "distributed_executor_backend": "ray"}, (2, 4)),
        ((8, 8), {"distributed_executor_backend": "ray"}, (8, 0)),
    ],
)
def test_ranks_that_fit_no_host_are_placed_one_by_one(
    plans: list[FleetPlan],
    monkeypatch: pytest.MonkeyPatch,
    processors: tuple[float, ...],
    given: dict[str, Any],
    expected: tuple[float, int],
) -> None:
    hosts(monkeypatch, *processors)
    app({"model": "m", **given})
    assert (plans[0].cpus, plans[0].spread) == expected
    backend = plans[0].options.get("distributed_executor_backend")
    assert (backend == "ray") == (plans[0].spread > 0 or "distributed_executor_backend" in given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpus_per_replica": 18}, "--cpus-per-replica 18 are 9 for each of 2 ranks, and no host has more than 8"),
        ({"cpus_per_replica": 12, "kv_store": "folder:///nowhere"}, "does not work where the 2 ranks of a replica"),
    ],
)
def test_ranks_on_several_hosts_that_cannot_work_are_refused(
    plans: list[FleetPlan], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    hosts(monkeypatch, 8, 8)
    with pytest.raises(ValueError, match=message):
        app({"model": "m", "tensor_parallel_size": 2, **given})


def test_more_replicas_than_a_host_has_processors_for_are_refused(
    run: Run, plans: list[FleetPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["torch_pagoda.cli.fleet"], "_join_ray", lambda address: True)
    status, out, err = run("fleet", "m", "--replicas", "17")
    assert (status, out, plans) == (2, "", [])
    assert "--replicas 17 with 1 processors each need 17, and this host has 16; lower --replicas" in err
    address = "folder:///nowhere/kv"
    status, out, err = run("fleet", str(MODEL), "--replicas", "15", "--prefill-replicas", "2", "--kv-store", address)
    assert (status, out, plans) == (2, "", [])
    assert "each and --prefill-replicas 2 with 1 need 17, and this host has 16" in err
