"""A Ray in this process: a test says on which hosts it places ranks, and what becomes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HERE = "this host"
PLACED = bytes(range(18))
"""Id of each placement group."""


class FakeRay(ModuleType):
    """Stands for ``ray``.

    Args:
        hosts: of the bundles of a placement group; none: it finds no place.
        follow: what the work of an actor is, with the arguments of ``RayRank.follow``.
        begin: what its beginning is.

    Attributes:
        asked: the arguments of each placement group.
        removed: placement groups.
        actors: those made, each with ``bundle`` and ``num_cpus``.
        killed: actors.
        is_client: this process is a client of a cluster.
    """

    class PlacementGroupID:
        def __init__(self, number: bytes) -> None:
            assert number == PLACED

    def __init__(
        self,
        hosts: Sequence[str] = (),
        follow: Callable[..., None] = lambda *_: None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("ray")
        self._follow, self._begin = follow, begin
        self.asked: list[tuple[Any, ...]] = []
        self.removed: list[Any] = []
        self.actors: list[Any] = []
        self.killed: list[Any] = []
        self.is_client = False
        self.is_initialized = lambda: True
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.RayError = type("RayError", (Exception,), {})
        self.exceptions.GetTimeoutError = type("GetTimeoutError", (self.exceptions.RayError, TimeoutError), {})
        self.group = SimpleNamespace(wait=lambda seconds: bool(hosts), bundle_specs=[{"CPU": 3.0}] * len(hosts))
        self.util = SimpleNamespace(
            client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: self.is_client)),
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=self._place,
            placement_group_table=lambda group: {"bundles_to_node_id": dict(enumerate(hosts))},
            remove_placement_group=self.removed.append,
        )

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(
            gcs_address="127.0.0.1:1", get_node_id=lambda: HERE, get_placement_group_id=lambda: PLACED.hex()
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeID": HERE, "Resources": {"CPU": 2.0}}]

    def available_resources(self) -> dict[str, float]:
        return {}

    def get(self, value: Callable[[], Any], timeout: float) -> Any:
        return value()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def remote(self, num_cpus: float, scheduling_strategy: tuple[Any, int]) -> Callable[[type], Any]:
        group, bundle = scheduling_strategy
        assert group is self.group

        def make() -> Any:
            actor = SimpleNamespace(
                bundle=bundle,
                num_cpus=num_cpus,
                begin=SimpleNamespace(remote=lambda: self._begin),
                follow=SimpleNamespace(
                    remote=lambda *terms: SimpleNamespace(
                        future=lambda: ThreadPoolExecutor(1).submit(self._follow, *terms)
                    )
                ),
            )
            self.actors.append(actor)
            return actor

        return lambda kind: SimpleNamespace(remote=make)

    def _place(self, bundles: Sequence[Any], strategy: str, bundle_label_selector: Sequence[Any]) -> Any:
        self.asked.append((bundles, strategy, bundle_label_selector))
        return self.group

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
        """Let it be what ``import ray`` finds."""
        placements, strategies = ModuleType("ray.util.placement_group"), ModuleType("ray.util.scheduling_strategies")
        placements.PlacementGroup = lambda number: self.group  # type: ignore[attr-defined]
        strategies.PlacementGroupSchedulingStrategy = lambda *where: where  # type: ignore[attr-defined]
        for module in (self, self.exceptions, placements, strategies):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(sys.modules, "ray.util", self.util)
        return self
