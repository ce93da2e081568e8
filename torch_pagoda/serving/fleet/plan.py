"""What a fleet serves and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...runtime.requests.checks import real_number, whole_number
from ..monitoring.logs import LogFormat, LogRequests
from ..settings import Settings


@dataclass(frozen=True)
class FleetPlan:
    """One fleet, validated at construction; sent to all of its processes.

    Attributes:
        model: checkpoint folder or hub id, the same on all hosts.
        tokenizer: folder or hub id; None: the model's.
        options: keyword arguments of ``LLM``.
        settings: of the front.
        engine_argv: the command of an engine process.
        replicas: number of replicas, with autoscaling those at the start.
        autoscaling: fields of Serve's ``AutoscalingConfig``; None: the number stays.
        cpus: processors that Ray reserves for a replica, and threads of its engine.
        npus: NPUs that Ray reserves for a replica.
        spread: ranks that Ray places one by one, on several hosts where one has no room for all; 0: the engine
            process starts them beside it.
        log_format: of all processes.
        log_requests: what the front logs of each request.
        prefill: the same of the replicas that compute prompts for the others; None: there are none.
    """

    model: str
    tokenizer: str | None
    options: Mapping[str, Any]
    settings: Settings
    engine_argv: tuple[str, ...]
    replicas: int = 1
    autoscaling: Mapping[str, Any] | None = None
    cpus: float = 1.0
    npus: int = 0
    spread: int = 0
    log_format: LogFormat = "text"
    log_requests: LogRequests = "ids"
    prefill: FleetPlan | None = None

    def __post_init__(self) -> None:
        whole_number("replicas", self.replicas, 1, "use 1 or more")
        real_number("cpus_per_replica", self.cpus, 0, float("inf"), "use a positive number", open_low=True)
        if self.autoscaling is not None and self.autoscaling.get("min_replicas", 1) < 1:
            raise ValueError("autoscaling_config: min_replicas=0 is not supported; use 1 or more")
