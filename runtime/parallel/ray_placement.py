"""Joins a Ray cluster, and finds a place in it for each rank of a group."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

PLACEMENT = "TORCH_PAGODA_RAY_PLACEMENT"
"""In the environment of an engine process: the placement group that its replica of a fleet has got for it."""
VERSIONS = ((2, 60), (2, 62))
"""The first version of Ray that this runs with, and the first not tried."""
PLACE_SECONDS = 60.0
"""For which ranks wait for resources that others use, or that Ray's autoscaler brings."""


class RayPlacement:
    """A bundle of resources for each rank, that of rank 0 on this host: as many as fit there, too, and the others on
    as few hosts as can be.

    Args:
        size: number of ranks.
        resources: of each, as Ray names them.

    Attributes:
        group: Ray's placement group.
        resources: of each rank.
        bundles: number of the bundle of each rank. Ranks that follow each other are on one host where they can be.

    Raises:
        ValueError: the cluster has not got them.
    """

    def __init__(self, size: int, resources: Mapping[str, float]) -> None:
        import ray
        from ray.util.placement_group import PlacementGroup

        if ray.util.client.ray.is_connected():
            raise ValueError(
                "ranks that Ray starts need rank 0 on a host of the cluster, and this process is a client of one "
                "(ray://); run it on a host of the cluster"
            )
        given = os.environ.get(PLACEMENT)
        self._is_own, self.resources = given is None, resources
        if given is None:
            here = [{"ray.io/node-id": ray.get_runtime_context().get_node_id()}]
            self.group = ray.util.placement_group(
                [dict(resources)] * size, strategy="PACK", bundle_label_selector=[*here, *[{}] * (size - 1)]
            )
        else:
            self.group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(given)))
            self.resources = self.group.bundle_specs[0]
        if not self.group.wait(PLACE_SECONDS):
            self.close()
            raise ValueError(
                f"{size} ranks need {_named(resources)} each, one of them on this host, and Ray did not find that "
                f"within {PLACE_SECONDS:g} s; the cluster has {_cluster()}; add hosts, lower the number of "
                "ranks, or lower OMP_NUM_THREADS, which is what a rank asks for"
            )
        hosts: Mapping[int, str] = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        self.bundles: Sequence[int] = sorted(range(size), key=lambda i: (i > 0, hosts[i] != hosts[0], hosts[i]))

    def close(self) -> None:
        """Give the resources back, unless somebody else has got them."""
        import ray

        if self._is_own and ray.is_initialized():
            ray.util.remove_placement_group(self.group)


def hand_on() -> None:
    """Let a process that this one starts join its cluster, and place its ranks in the placement group of this one."""
    import ray

    context = ray.get_runtime_context()
    os.environ["RAY_ADDRESS"] = context.gcs_address
    os.environ[PLACEMENT] = str(context.get_placement_group_id())


def check_ray(what: str) -> None:
    """Check that Ray is installed, in a version that this was tried with.

    Args:
        what: needs it.

    Raises:
        ValueError: one line with the remedy.
    """
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{what} needs Ray; install it: pip install 'torch-pagoda[fleet]'") from None
    first, end = (".".join(map(str, of)) for of in VERSIONS)
    if not VERSIONS[0] <= tuple(int(part) for part in version.split(".")[:2]) < VERSIONS[1]:
        raise ValueError(
            f"{what} needs Ray from {first} to below {end}, and {version} is installed; "
            "install it: pip install 'torch-pagoda[fleet]'"
        )


def join_ray(address: str, **options: Any) -> None:
    """Join a Ray cluster, or start one on this host, unless this process belongs to one; SIGTERM does what it did
    before.

    Args:
        address: see ``ray.init``; ``"auto"``: the one that RAY_ADDRESS names, or that runs on this host.
        options: of ``ray.init``.

    Raises:
        ValueError: the cluster cannot be used.
    """
    import ray

    if ray.is_initialized():
        return
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this host" if address in ("auto", "local") else f"at {address}"
        raise ValueError(
            f"Ray {where} cannot be used: {' '.join(str(error).split())[:500]}; start it with 'ray start --head', "
            f"of the version that is installed here ({ray.__version__}); where it asks for a token, set "
            "RAY_AUTH_MODE=token"
        ) from error
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _named(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in resources.items())


def _cluster() -> str:
    """What the hosts of the cluster have, and what nobody has reserved."""
    import ray

    here, found = ray.get_runtime_context().get_node_id(), []
    for node in ray.nodes():
        if node["Alive"]:
            name = "this host" if node["NodeID"] == here else node["NodeManagerAddress"]
            found.append(f"{_named(_countable(node['Resources'])) or 'nothing'} at {name}")
    free = _named(_countable(ray.available_resources()))
    return f"{', '.join(found)}; {free or 'nothing'} of it free"


def _countable(resources: Mapping[str, float]) -> Mapping[str, float]:
    return {name: resources[name] for name in ("CPU", "NPU") if name in resources}
