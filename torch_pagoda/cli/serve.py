"""``pagoda serve``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .engine_options import (
    AsyncScheduling,
    BatchInvariant,
    BlockSize,
    Codegen,
    Device,
    Dtype,
    EnablePrefixCaching,
    GroupSize,
    InputBits,
    KvCacheDtype,
    KvCacheMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MinKvCacheMemory,
    NoAsyncScheduling,
    NoEnablePrefixCaching,
    NpuOptions,
    NpuWarmup,
    NumBlocks,
    OnlyPass,
    Policy,
    Preemption,
    Quantization,
    Schedule,
    SkipPass,
    StaticDecode,
    SwapSpace,
    Tokenizer,
    TrustRemoteCode,
    Verify,
    check_engine_options,
    llm_options,
)
from .errors import one_line_errors
from .serve_options import KEY_VARIABLE, make_settings, read_config

if TYPE_CHECKING:
    from ..runtime.serving.settings import Settings

_SERVER, _ACCESS, _LIMITS, _ANSWERS = "Server", "Access", "Limits and times", "Answers"
_NEEDED = ("fastapi", "uvicorn", "httptools", "msgspec", "prometheus_client", "markdown_it", "pygments")
"""Modules of the extra that there is no serving without."""


def serve(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or hub id.", metavar="MODEL")],
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", rich_help_panel=_SERVER)] = 8000,
    uds: Annotated[
        str | None, typer.Option(help="Path of a Unix socket instead.", metavar="PATH", rich_help_panel=_SERVER)
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model for clients; repeatable.", metavar="NAME", rich_help_panel=_SERVER),
    ] = None,
    restart_engine: Annotated[
        int, typer.Option(help="Starts of another engine in 10 minutes.", rich_help_panel=_SERVER)
    ] = 3,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="No chat page at /.", rich_help_panel=_SERVER)] = False,
    root_path: Annotated[
        str, typer.Option(help="Prefix that a proxy takes off paths.", rich_help_panel=_SERVER)
    ] = "",
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="Certificate, for https.", metavar="FILE", rich_help_panel=_SERVER)
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Its key.", metavar="FILE", rich_help_panel=_SERVER)
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(help="Clients must show a certificate of these.", metavar="FILE", rich_help_panel=_SERVER),
    ] = None,
    log_format: Annotated[str, typer.Option(help="text or json.", rich_help_panel=_SERVER)] = "text",
    log_requests: Annotated[
        str, typer.Option(help="none, ids (a line each), or content.", rich_help_panel=_SERVER)
    ] = "ids",
    metrics_prefix: Annotated[
        str, typer.Option(help="Names in /metrics: both, vllm, pagoda.", rich_help_panel=_SERVER)
    ] = "both",
    trace_endpoint: Annotated[
        str | None, typer.Option(help="OTLP collector for traces.", metavar="URL", rich_help_panel=_SERVER)
    ] = None,
    enable_admin: Annotated[
        bool,
        typer.Option("--enable-admin", help="/server_info, /reset_prefix_cache.", rich_help_panel=_SERVER),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="JSON or YAML: defaults of these options.",
            metavar="FILE",
            callback=read_config,
            is_eager=True,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"KEY or NAME=KEY; repeatable; or {KEY_VARIABLE}.", rich_help_panel=_ACCESS),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="The same, one per line.", metavar="FILE", rich_help_panel=_ACCESS)
    ] = None,
    protect_metrics: Annotated[
        bool, typer.Option("--protect-metrics", help="/metrics needs a key, too.", rich_help_panel=_ACCESS)
    ] = False,
    isolate_keys: Annotated[
        bool, typer.Option("--isolate-keys", help="Keys share no cached prompts.", rich_help_panel=_ACCESS)
    ] = False,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Pages that may call (CORS); repeatable.", rich_help_panel=_ACCESS),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(help="Names of a proxy in front; repeatable.", rich_help_panel=_ACCESS),
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Completions that wait; 4 for each seq.", rich_help_panel=_LIMITS)
    ] = None,
    # vLLM's name.
    max_num_queued_reqs: Annotated[int | None, typer.Option(hidden=True)] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens that wait.", rich_help_panel=_LIMITS)
    ] = None,
    max_logprobs: Annotated[int, typer.Option(help="Likely tokens per token.", rich_help_panel=_LIMITS)] = 20,
    max_body_size: Annotated[int, typer.Option(help="Bytes of a request.", rich_help_panel=_LIMITS)] = 8 * 2**20,
    max_connections: Annotated[int, typer.Option(help="Open at a time.", rich_help_panel=_LIMITS)] = 2048,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds for an answer.", rich_help_panel=_LIMITS)
    ] = None,
    header_timeout: Annotated[float, typer.Option(help="For headers.", rich_help_panel=_LIMITS)] = 10.0,
    body_timeout: Annotated[float, typer.Option(help="For a body.", rich_help_panel=_LIMITS)] = 30.0,
    stream_stall_timeout: Annotated[
        float, typer.Option(help="For a reader that is stuck.", rich_help_panel=_LIMITS)
    ] = 60.0,
    sse_ping: Annotated[float, typer.Option(help="Without news, until a comment.", rich_help_panel=_LIMITS)] = 15.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="After SIGTERM, for what runs.", rich_help_panel=_LIMITS)
    ] = 30.0,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja, in place of the model's.", metavar="FILE", rich_help_panel=_ANSWERS),
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(help="Its variables.", metavar="JSON", rich_help_panel=_ANSWERS)
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Accept a chat template in requests. Use it with clients that you trust.",
            rich_help_panel=_ANSWERS,
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None, typer.Option(help="Format of tool calls.", metavar="NAME", rich_help_panel=_ANSWERS)
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(help="Format of reasoning.", metavar="NAME", rich_help_panel=_ANSWERS)
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(help="The model's defaults: auto, a folder, none.", rich_help_panel=_ANSWERS),
    ] = "auto",
    strict_fields: Annotated[
        bool, typer.Option("--strict-fields", help="Refuse unknown fields.", rich_help_panel=_ANSWERS)
    ] = False,
    tokenizer: Tokenizer = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    kv_cache_memory: KvCacheMemory = None,
    min_kv_cache_memory: MinKvCacheMemory = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    quantization: Quantization = None,
    group_size: GroupSize = None,
    input_bits: InputBits = None,
    batch_invariant: BatchInvariant = False,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    no_enable_prefix_caching: NoEnablePrefixCaching = False,
    enable_prefix_caching: EnablePrefixCaching = False,
    policy: Policy = "fcfs",
    preemption: Preemption = "auto",
    swap_space: SwapSpace = "0",
    async_scheduling: AsyncScheduling = False,
    no_async_scheduling: NoAsyncScheduling = False,
    npu_warmup: NpuWarmup = "full",
    verify: Verify = "model",
    codegen: Codegen = "auto",
    npu_options: NpuOptions = None,
    static_decode: StaticDecode = False,
    schedule: Schedule = None,
    skip_pass: SkipPass = None,
    only_pass: OnlyPass = None,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Serve a model over HTTP, as OpenAI does: completions, chat, streams.

    Prints one line to stdout when it takes requests; logs go to stderr. SIGTERM lets what is under way end. Exit
    status: 0 after a signal, 1 if the engine ended for good, 2 for a mistake in the arguments.
    """
    given = dict(locals())
    with one_line_errors(debug):
        _check_extra()
        check_engine_options(given)
        if (ssl_certfile is None) != (ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile belong together; give both")
        if ssl_ca_certs is not None and ssl_certfile is None:
            raise ValueError("--ssl-ca-certs needs https; give --ssl-certfile and --ssl-keyfile")
        with _one_thread():  # all cores are the engine's
            import torch

            from .. import __version__
            from .serving import Glue

            torch.set_num_threads(1)
        if generation_config == "none":
            given["generation_config"] = "vllm"
        given["max_queue"] = None  # the server's own, not the engine's
        options = llm_options(given)
        given["max_queue"] = max_num_queued_reqs if max_queue is None else max_queue
        settings = make_settings(model, given, options, __version__)
        _warn_of_open_door(settings)
        glue = Glue(model, tokenizer, options, settings, given)
        status = glue.run(lambda line: print(line, flush=True))
    if status:
        raise typer.Exit(status)


def _check_extra() -> None:
    """Name the extra where something of it is missing.

    Raises:
        ValueError: one line.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"pagoda serve needs {', '.join(missing)}; install them: pip install 'torch-pagoda[serve]'")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Imports within keep libraries from starting threads for each core: those belong to the engine's process."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _warn_of_open_door(settings: Settings) -> None:
    if not settings.api_keys and not settings.is_loopback:
        typer.echo(
            f"pagoda: warning: whoever reaches {settings.host} can use this server; give it an --api-key", err=True
        )
