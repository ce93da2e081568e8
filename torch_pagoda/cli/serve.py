"""``pagoda serve``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from ..serving.settings import Settings
from .engine_options import ENGINE_PANELS, LLM_OPTIONS
from .errors import one_line_errors
from .serve_options import ServeOptions, make_settings
from .with_options import Model, with_options

NEEDED = ("fastapi", "uvicorn", "httptools", "msgspec", "prometheus_client", "markdown_it", "pygments")
"""Modules of the extra ``serve`` that there is no serving without."""

_PANELS = (
    (
        "Server",
        "host port uds served_model_name data_parallel_size restart_engine no_ui root_path ssl_certfile ssl_keyfile "
        "ssl_ca_certs kv_events_config log_format log_requests metrics_prefix trace_endpoint enable_admin config",
    ),
    ("Access", "api_key api_key_file protect_metrics isolate_keys allowed_origins allowed_hosts"),
    (
        "Limits and times",
        "max_queue max_num_queued_reqs max_queued_tokens max_logprobs max_body_size max_connections request_timeout "
        "header_timeout body_timeout stream_stall_timeout sse_ping shutdown_timeout",
    ),
    (
        "Answers",
        "chat_template default_chat_template_kwargs trust_request_chat_template tool_call_parser reasoning_parser "
        "generation_config strict_fields",
    ),
    *ENGINE_PANELS,
    ("", "verbose debug"),
)


@with_options(ServeOptions, _PANELS, (Settings,), LLM_OPTIONS)
def serve(model: Model, own: ServeOptions, server: dict[str, Any], engine: dict[str, Any]) -> None:
    """Serve a model over HTTP, as OpenAI does: completions, chat, streams.

    Prints one line to stdout when it takes requests; logs go to stderr. SIGTERM lets what is under way end. Exit
    status: 0 after a signal, 1 if the engine ended for good, 2 for a mistake in the arguments.
    """
    with one_line_errors(own.debug):
        check_extra("pagoda serve", NEEDED, "serve")
        if (own.ssl_certfile is None) != (own.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile need each other; give both")
        if own.ssl_ca_certs is not None and own.ssl_certfile is None:
            raise ValueError("--ssl-ca-certs needs TLS; give --ssl-certfile and --ssl-keyfile")
        with _one_thread():  # all cores are the engine's
            import torch

            from .. import __version__
            from .serving import Glue, follows_launcher

            torch.set_num_threads(1)
        options = own.llm_options(engine)
        if own.generation_config == "none":
            options["generation_config"] = "vllm"
        if follows_launcher(options):
            from ..llm import LLM

            LLM(model, own.tokenizer, **options)  # ends this process with rank 0
        settings = make_settings(model, own, server, options, __version__)
        warn_of_open_door(settings)
        glue = Glue(model, options, settings, own)
        status = glue.run(lambda line: print(line, flush=True))
    if status:
        raise typer.Exit(status)


def check_extra(command: str, needed: Sequence[str], extra: str) -> None:
    """Check that the optional dependencies are installed.

    Raises:
        ValueError: one line that names the missing ones.
    """
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{command} needs {', '.join(missing)}; install them: pip install 'torch-pagoda[{extra}]'")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Imports in this context keep libraries from starting one thread per core, which only the engine process
    needs."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def warn_of_open_door(settings: Settings) -> None:
    if not settings.api_keys and not settings.is_loopback:
        typer.echo(
            f"pagoda: warning: anyone who can reach {settings.host} can use this server; set --api-key", err=True
        )
