"""Assembles ``pagoda serve``: tokenizer, engine, application and server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from fastapi import FastAPI
from msgspec.structs import replace as replace_fields
from transformers.utils import logging as transformers_logging

from ..checkpoint.configs import load_tokenizer
from ..device import resolve_device
from ..runtime.engine.engine_options import EngineOptions
from ..runtime.parallel.torchrun import Place
from ..runtime.processors import shares
from ..runtime.restart_limit import RestartLimit
from ..serving.app import load_formats, make_app
from ..serving.engine_process.pool_client import PoolClient
from ..serving.engine_process.process_client import ProcessClient
from ..serving.engine_process.wire import Start
from ..serving.monitoring.logs import LogFormat, LogRequests, RequestLog, set_up_logs
from ..serving.monitoring.tracing import RequestTracer
from ..serving.server import Server, StartedClient, bind
from ..serving.settings import Settings
from .engine_process import engine_argv
from .frozen_objects import freeze_objects
from .serve_options import ServeOptions

QUEUE_PER_SEQUENCE = 4
"""``max_queue`` by default, for each sequence that runs."""


class Glue:
    """One run of the command.

    Args:
        model: checkpoint folder or hub id.
        options: keyword arguments of ``LLM``.
        settings: settings of the server.
        own: options of this command only.

    Raises:
        ValueError: an option or address is invalid.
    """

    def __init__(self, model: str, options: dict[str, Any], settings: Settings, own: ServeOptions) -> None:
        check_logs(own)
        set_up_logs(own.log_format, own.verbose)
        engines = own.data_parallel_size
        _check_engines(engines, options)
        sequences = engines * options.get("max_num_seqs", EngineOptions.max_num_seqs)
        queue = QUEUE_PER_SEQUENCE * sequences if settings.max_queue is None else settings.max_queue
        # What comes between two steps of the engine waits there all at once: the server's limit holds, not this.
        self._options = {**options, "max_queue": queue + sequences}
        self._settings = replace(settings, max_queue=queue)
        self._model, self._own = model, own
        self._kv_events = own.kv_events(options)
        self._sock = bind(settings)
        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
        trusts = options["trust_remote_code"]
        self._tokenizer = load_tokenizer(own.tokenizer or model, trusts, required=own.tokenizer is not None)
        self._formats = load_formats(settings, self._tokenizer)
        files = {name: getattr(own, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
        self._tls = {name: str(file) for name, file in files.items() if file is not None}
        if "ssl_ca_certs" in self._tls:
            import ssl

            self._tls["ssl_cert_reqs"] = ssl.CERT_REQUIRED  # type: ignore[assignment]

    def run(self, say: Callable[[str], None]) -> int:
        """Serve until a signal; returns the exit status.

        Args:
            say: called with the line for stdout.
        """
        try:
            import uvloop

            factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
        except ImportError:
            factory = None
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(self._serve(say))

    async def _serve(self, say: Callable[[str], None]) -> int:
        client = self._client()
        server = Server(self._app(client), client, self._settings, self._sock, self._tls)
        await client.start()

        def ready(address: str) -> None:
            freeze_objects()
            say(f"pagoda: serving {self._settings.model_name} on {address}")

        return await server.run(ready)

    def _client(self) -> ProcessClient | PoolClient:
        count = self._own.data_parallel_size
        start = Start(
            self._model,
            self._own.tokenizer,
            self._options,
            log_format=self._own.log_format,
            reports_cache=count > 1 and self._options.get("enable_prefix_caching", True),
            kv_events=self._kv_events,
        )
        if count == 1:
            return self._process_client(start)
        parts = [sorted(share) for share in shares(count)]
        return PoolClient(
            [
                self._process_client(replace_fields(start, processors=processors, data_parallel_rank=number))
                for number, processors in enumerate(parts)
            ]
        )

    def _process_client(self, start: Start) -> ProcessClient:
        return ProcessClient(engine_argv(), start, restarts=RestartLimit(self._own.restart_engine))

    def _app(self, client: StartedClient) -> FastAPI:
        endpoint = self._own.trace_endpoint
        return make_app(
            self._settings,
            client,
            self._tokenizer,
            formats=self._formats,
            log=RequestLog(self._own.log_requests),
            tracer=None if endpoint is None else RequestTracer.to_endpoint(endpoint),
        )


def follows_launcher(options: Mapping[str, Any]) -> bool:
    """Whether a launcher has started this process as another rank than the one that serves.

    Raises:
        ValueError: no launcher has.
    """
    if options.get("distributed_executor_backend", "mp") != "external_launcher":
        return False
    return Place.of_environment().rank > 0


def _check_engines(count: int, options: Mapping[str, Any]) -> None:
    """Refuse more engines than there are processors for.

    Raises:
        ValueError: too few processors, or an NPU, of which one server drives a single device.
    """
    if count < 1:
        raise ValueError(f"--data-parallel-size {count} is below 1; use 1 or more")
    if count == 1:
        return
    backend = options.get("distributed_executor_backend", "mp")
    if backend != "mp":
        starts, instead = "a launcher starts", "start one server for each"
        if backend == "ray":
            starts, instead = "with Ray it is for", f"use pagoda fleet --replicas {count}"
        raise ValueError(f"--data-parallel-size {count}: {starts} the ranks of one engine; {instead}")
    if resolve_device(options.get("device", "auto")).type != "cpu":
        raise ValueError(f"--data-parallel-size {count} runs on CPUs only so far; start one server for each device")
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    needed, there = count * ranks, len(os.sched_getaffinity(0))
    if needed > there:
        raise ValueError(
            f"--data-parallel-size {count} needs {needed} processors, one for each rank, and this process may use "
            f"{there}; lower it"
        )


def check_logs(own: ServeOptions) -> None:
    """Refuse unknown kinds of logs.

    Raises:
        ValueError: with those that are known.
    """
    for name, known in (("log_format", get_args(LogFormat)), ("log_requests", get_args(LogRequests))):
        if (value := getattr(own, name)) not in known:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not known; use one of {', '.join(known)}")
