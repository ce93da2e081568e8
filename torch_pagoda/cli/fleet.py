"""``pagoda fleet``."""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..runtime.option import option
from ..runtime.parallel.ray_placement import check_ray, join_ray
from ..serving.settings import Settings
from .engine_options import ENGINE_PANELS, LLM_OPTIONS
from .errors import one_line_errors
from .serve import NEEDED, check_extra, warn_of_open_door
from .serve_options import ServeOptions, make_settings
from .with_options import Model, json_object, with_options

if TYPE_CHECKING:
    from ray.serve import Application

    from ..serving.fleet.plan import FleetPlan

_STORE_WAIT = 10.0
"""``kv_store_wait`` by default where another replica has just stored the blocks, in seconds."""

_PANELS = (
    (
        "Fleet",
        "replicas prefill_replicas prefill_tensor_parallel_size autoscaling_config cpus_per_replica address app_name "
        "host port served_model_name no_ui root_path "
        "log_format log_requests metrics_prefix enable_admin config",
    ),
    ("Access", "api_key api_key_file protect_metrics isolate_keys allowed_origins allowed_hosts"),
    (
        "Limits and times",
        "max_queue max_num_queued_reqs max_queued_tokens max_logprobs max_body_size request_timeout body_timeout "
        "sse_ping shutdown_timeout",
    ),
    (
        "Answers",
        "chat_template default_chat_template_kwargs trust_request_chat_template tool_call_parser reasoning_parser "
        "generation_config strict_fields",
    ),
    *ENGINE_PANELS,
    ("", "verbose debug"),
)


@dataclass(frozen=True)
class FleetOptions(ServeOptions):
    """Options of ``pagoda fleet``, in addition to the server's settings and the keyword arguments of ``LLM``."""

    replicas: int = option(1, "Replicas of the model; with autoscaling, those at the start.")
    prefill_replicas: int = option(0, "Further replicas, which compute prompts for the others; needs --kv-store.")
    prefill_tensor_parallel_size: int | None = option(None, "Their ranks; by default those of the others.")
    autoscaling_config: str | None = option(None, "Fields of Ray Serve's AutoscalingConfig (JSON).", metavar="JSON")
    cpus_per_replica: float | None = option(
        None, "Processors that Ray reserves for a replica; by default equal shares of the cluster's."
    )
    address: str | None = option(None, "Ray cluster to join; by default RAY_ADDRESS, or one that is started here.")
    app_name: str = option("pagoda", "Name of the application in Ray Serve.")


@with_options(FleetOptions, _PANELS, (Settings,), LLM_OPTIONS)
def fleet(model: Model, own: FleetOptions, server: dict[str, Any], engine: dict[str, Any]) -> None:
    """Serve replicas of a model behind one address, with Ray Serve.

    Prints one line to stdout when all replicas take requests. SIGTERM lets what is under way end. Exit status: 0
    after a signal, 1 if the replicas could not start, 2 for a mistake in the arguments.
    """
    with one_line_errors(own.debug):
        _check_ray()
        settings = make_settings(model, own, server, engine, _version())
        warn_of_open_door(settings)
        is_local = _join_ray(own.address)
        import ray
        from ray import serve

        try:
            plan = make_plan(model, own, settings, engine)
            if is_local:
                _check_processors(plan)
            _start_serve(settings)
            status = _serve(plan, own, settings)
        finally:
            if is_local:
                serve.shutdown()
            ray.shutdown()
    if status:
        raise typer.Exit(status)


@with_options(FleetOptions, _PANELS, (Settings,), LLM_OPTIONS)
def _bind(model: Model, own: FleetOptions, server: dict[str, Any], engine: dict[str, Any]) -> Any:
    """The application of a fleet."""
    from ..serving.fleet.deployments import application

    return application(make_plan(model, own, make_settings(model, own, server, engine, _version()), engine))


def application_of(arguments: Mapping[str, Any]) -> Application:
    """The application of ``serve run torch_pagoda.fleet:app``.

    Args:
        arguments: ``model``, and options of ``pagoda fleet`` with their names in Python.

    Raises:
        ValueError: an argument is missing, unknown or invalid.
    """
    _check_ray()
    values = dict(arguments)
    if "model" not in values:
        raise ValueError("model is missing; give model=MODEL")
    argv = [str(values.pop("model")), "--debug"]
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool) or value in ("true", "false"):
            is_on = value in (True, "true")
            argv += [flag] if is_on else [f"--no-{flag[2:]}"]
        elif isinstance(value, list):
            argv += [part for item in value for part in (flag, str(item))]
        else:
            argv += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    binder = typer.Typer(add_completion=False)
    binder.command()(_bind)
    try:
        found: Application = typer.main.get_command(binder).main(argv, prog_name="fleet", standalone_mode=False)
    except Exception as error:
        if hasattr(error, "format_message"):  # of click, see ``cli.main``
            raise ValueError(f"fleet: {error.format_message()}") from None
        raise
    return found


def make_plan(model: str, own: FleetOptions, settings: Settings, engine: Mapping[str, Any]) -> FleetPlan:
    """What a fleet serves.

    Raises:
        ValueError: an option is invalid.
    """
    import ray

    from ..runtime.engine.engine_options import EngineOptions
    from ..runtime.requests.checks import whole_number
    from ..serving.fleet.plan import FleetPlan
    from .engine_process import engine_argv
    from .serving import QUEUE_PER_SEQUENCE, check_logs

    check_logs(own)
    options = own.llm_options(engine)
    if options.get("distributed_executor_backend", "mp") == "external_launcher":
        raise ValueError("a fleet starts the ranks of a replica itself; leave out --distributed-executor-backend")
    text = own.autoscaling_config
    autoscaling = None if text is None else json_object("--autoscaling-config", text)
    most = own.replicas if autoscaling is None else int(autoscaling.get("max_replicas", own.replicas))
    sequences = options.get("max_num_seqs", EngineOptions.max_num_seqs)
    queue = QUEUE_PER_SEQUENCE * sequences * most if settings.max_queue is None else settings.max_queue
    # "serve run" makes the application before it joins a cluster.
    nodes = ray.nodes() if ray.is_initialized() else []
    hosts = [float(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    count = max(most + own.prefill_replicas, 1)
    share = share_of_hosts(hosts, count)

    def of_ranks(plan: FleetPlan, options: Mapping[str, Any]) -> FleetPlan:
        """The plan with these options, and what Ray reserves for them."""
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        cpus = max(float(ranks), share) if own.cpus_per_replica is None else own.cpus_per_replica
        npus = ranks if str(options.get("device", "auto")).startswith("npu") else 0
        plan = replace(plan, options=options, cpus=cpus, npus=npus)
        is_asked = options.get("distributed_executor_backend", "mp") == "ray"
        if ranks == 1 or npus or not (is_asked or cpus > max(hosts, default=cpus)):
            return plan
        part = cpus / ranks if own.cpus_per_replica is not None else max(share_of_hosts(hosts, count * ranks), 1.0)
        return _spread(plan, ranks, part // 1 or part, hosts)

    plan = FleetPlan(
        model=_absolute(model),
        tokenizer=None if own.tokenizer is None else _absolute(own.tokenizer),
        options={**options, "max_queue": queue + sequences},
        settings=replace(settings, max_queue=queue),
        engine_argv=tuple(engine_argv()),
        replicas=own.replicas,
        autoscaling=autoscaling,
        log_format=own.log_format,
        log_requests=own.log_requests,
    )
    plan = of_ranks(plan, plan.options)
    whole_number("prefill_replicas", own.prefill_replicas, 0, "use 0 or more")
    if not own.prefill_replicas:
        if own.prefill_tensor_parallel_size is not None:
            raise ValueError("--prefill-tensor-parallel-size needs --prefill-replicas; give both")
        return plan
    to_prefill, to_decode = _apart(own, plan)
    prefill = of_ranks(replace(plan, replicas=own.prefill_replicas, autoscaling=None), to_prefill)
    return replace(of_ranks(plan, to_decode), prefill=prefill)


def share_of_hosts(hosts: Sequence[float], count: int) -> float:
    """The most processors, a whole number, that so many can have each, every one on a single host; 0: there are too
    few.

    Args:
        hosts: processors of each.
        count: of those that share them.
    """
    most = int(max(hosts, default=0))
    return float(next((share for share in range(most, 0, -1) if sum(host // share for host in hosts) >= count), 0))


def _spread(plan: FleetPlan, ranks: int, part: float, hosts: Sequence[float]) -> FleetPlan:
    """The plan with ranks that may be on several hosts.

    Args:
        plan: of replicas.
        ranks: of each.
        part: processors of a rank.
        hosts: processors of each host; none where they are not known.

    Raises:
        ValueError: no host has these, or ``kv_store`` is to share blocks of these ranks.
    """
    if hosts and part > max(hosts):
        raise ValueError(
            f"--cpus-per-replica {plan.cpus:g} are {part:g} for each of {ranks} ranks, and no host has more than "
            f"{max(hosts):g}; lower it"
        )
    if plan.options.get("kv_store") is not None:
        raise ValueError(
            f"--kv-store does not work where the {ranks} ranks of a replica may be on several hosts; omit it, or let "
            "them fit on one, with fewer ranks or --cpus-per-replica"
        )
    options = {**plan.options, "distributed_executor_backend": "ray"}
    return replace(plan, options=options, cpus=part * ranks, spread=ranks)


def _apart(own: FleetOptions, plan: FleetPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engines' options where some compute prompts, and others read what those have stored.

    Raises:
        ValueError: there is no store, or it takes no blocks of this model.
    """
    from ..block_fingerprint import storable_files
    from ..options import split_options

    options = dict(plan.options)
    if options.get("kv_store") is None:
        raise ValueError(
            f"--prefill-replicas {own.prefill_replicas} needs a store that all replicas reach; give --kv-store"
        )
    prefill = {**options, "kv_store_write": "all"}
    if own.prefill_tensor_parallel_size is not None:
        prefill["tensor_parallel_size"] = own.prefill_tensor_parallel_size
    if options.get("kv_store_wait") is None:
        options["kv_store_wait"] = _STORE_WAIT
    for each in (prefill, options):
        loading, _, compiling = split_options(each, owns_weights=True)
        storable_files(plan.model, loading, compiling)
    return prefill, options


def _check_processors(plan: FleetPlan) -> None:
    """Refuse what a Ray that gets no further hosts can never start.

    Raises:
        ValueError: it has too few processors.
    """
    import ray

    needed, there = plan.replicas * plan.cpus, float(ray.cluster_resources().get("CPU", 0))
    further = ""
    if plan.prefill is not None:
        needed += plan.prefill.replicas * plan.prefill.cpus
        further = f" and --prefill-replicas {plan.prefill.replicas} with {plan.prefill.cpus:g}"
    if needed > there:
        raise ValueError(
            f"--replicas {plan.replicas} with {plan.cpus:g} processors each{further} need {needed:g}, and this host "
            f"has {there:g}; lower --replicas or --cpus-per-replica, or join a cluster with --address"
        )


def _check_ray() -> None:
    """Check that the optional dependencies are installed, Ray in a version that this was tried with.

    Raises:
        ValueError: one line with the remedy.
    """
    check_extra("pagoda fleet", (*NEEDED, "ray"), "fleet")
    check_ray("pagoda fleet")
    try:
        importlib.import_module("ray.serve")
    except ImportError as error:
        raise ValueError(f"Ray Serve is incomplete ({error}); pip install 'torch-pagoda[fleet]'") from error


def _join_ray(address: str | None) -> bool:
    """Join a Ray cluster, or start one on this host; returns whether it was started here.

    Raises:
        ValueError: the cluster cannot be joined.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address is None:
        join_ray("local", include_dashboard=False, log_to_driver=True)
    else:
        join_ray(address, log_to_driver=False)
    return address is None


def _start_serve(settings: Settings) -> None:
    """Start Ray Serve, unless the cluster has it.

    Raises:
        ValueError: it has, on another address.
    """
    from ray import serve
    from ray.serve.context import _get_global_client

    serve.start(http_options={"host": settings.host, "port": settings.port})
    client = _get_global_client()
    assert client is not None, "it was started"
    found = client.http_config
    if (found.host, found.port) != (settings.host, settings.port):
        raise ValueError(
            f"--host {settings.host} --port {settings.port}: Ray Serve runs on this cluster already, on "
            f"{found.host}:{found.port}; give these"
        )


def _serve(plan: FleetPlan, own: FleetOptions, settings: Settings) -> int:
    """Serve until a signal; returns the exit status."""
    from ray import serve
    from ray.exceptions import RayError

    from ..serving.fleet.deployments import application

    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            handle = serve.run(application(plan), name=own.app_name, route_prefix="/")
            handle.wait_for.remote(plan.replicas, 0 if plan.prefill is None else plan.prefill.replicas).result()
        except (RuntimeError, RayError) as error:
            reason = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), "")
            typer.echo(f"pagoda: error: the fleet did not start: {reason.strip()}", err=True)
            return 1
        typer.echo(f"pagoda: serving {settings.model_name} on http://{settings.host}:{settings.port}")
        stop.wait()
        return 0
    finally:
        serve.delete(own.app_name)
        for number, handler in before.items():
            signal.signal(number, handler)


def _absolute(source: str) -> str:
    """A folder or file as other processes find it; a hub id as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def _version() -> str:
    from .. import __version__

    return __version__
