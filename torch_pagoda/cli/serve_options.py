"""Converts options of ``pagoda serve`` to the server's settings: keys, files, names."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..runtime.option import option
from ..serving.settings import ApiKey, Settings
from .engine_options import EngineCommandOptions
from .with_options import json_object

if TYPE_CHECKING:
    from ..serving.monitoring.logs import LogFormat, LogRequests

KEY_VARIABLE = "PAGODA_API_KEY"

_NAMED_KEY = re.compile(r"([A-Za-z0-9_.-]{1,64})=([^=].*)")
_MAX_FILE = 2**20
"""Bytes of a file of keys, a template or a configuration."""


def read_text(option: str, file: Path) -> str:
    """A file's text.

    Raises:
        ValueError: it is not UTF-8 text, too large, or missing.
    """
    try:
        raw = file.read_bytes()
        if len(raw) > _MAX_FILE:
            raise ValueError(f"{option} {file} exceeds {_MAX_FILE} bytes; use a smaller file")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"{option} {file} could not be read: {error.strerror}; use another") from error


def read_config(context: Any, file: Path | None) -> Path | None:
    """Callback of ``--config``: the file's values become the defaults of the other options.

    Raises:
        ValueError: the file is not a JSON or YAML object, or names unknown options.
    """
    if file is None:
        return None
    try:
        text = read_text("--config", file)
        values = json_object("--config", text) if file.suffix == ".json" else _yaml_object(text)
        names = {parameter.name for parameter in context.command.params} - {"config", "model", "help"}
        renamed = {str(name).replace("-", "_"): value for name, value in values.items()}
        if unknown := sorted(set(renamed) - names):
            raise ValueError(f"--config {file} has unknown options {', '.join(unknown)}; see --help")
    except ValueError as error:
        raise typer.BadParameter(" ".join(str(error).split())) from error
    context.default_map = {**(context.default_map or {}), **renamed}
    return file


def _yaml_object(text: str) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--config is not valid YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("--config is not a YAML mapping; write 'option: value' lines")
    return value


@dataclass(frozen=True)
class ServeOptions(EngineCommandOptions):
    """Options of ``pagoda serve``, in addition to the server's settings and the keyword arguments of ``LLM``."""

    served_model_name: list[str] | None = option(None, "Name of the model for clients; repeatable.", metavar="NAME")
    data_parallel_size: int = option(
        1,
        "Engines that share the requests, each with a part of the processors.",
        flags=("--data-parallel-size", "-dp"),
    )
    kv_events_config: str | None = option(None, "vLLM's KV events (JSON).", metavar="JSON")
    restart_engine: int = option(3, "Starts of another engine in 10 minutes.")
    no_ui: bool = option(False, "No chat page at /.")
    ssl_certfile: Path | None = option(None, "Certificate, for https.", metavar="FILE")
    ssl_keyfile: Path | None = option(None, "TLS private key.", metavar="FILE")
    ssl_ca_certs: Path | None = option(None, "Clients must show a certificate of these.", metavar="FILE")
    log_format: LogFormat = option("text", "text or json.")
    log_requests: LogRequests = option("ids", "none, ids (a line each), or content.")
    trace_endpoint: str | None = option(None, "OTLP collector for traces.", metavar="URL")
    config: Path | None = option(
        None, "JSON or YAML: defaults of these options.", metavar="FILE", callback=read_config, is_eager=True
    )
    api_key: list[str] | None = option(None, f"KEY or NAME=KEY; repeatable; or {KEY_VARIABLE}.")
    api_key_file: Path | None = option(None, "The same, one per line.", metavar="FILE")
    max_num_queued_reqs: int | None = option(None, "vLLM's name of --max-queue.", hidden=True)
    chat_template: Path | None = option(None, "Jinja, in place of the model's.", metavar="FILE")
    default_chat_template_kwargs: str | None = option(None, "Chat-template variables (JSON).", metavar="JSON")
    generation_config: str = option("auto", "The model's defaults: auto, a folder, none.")
    verbose: bool = option(False, "Log more, to stderr.", flags=("--verbose", "-v"))

    def kv_events(self, engine: Mapping[str, Any]) -> dict[str, Any] | None:
        """The fields of ``KvEventsConfig``; None: nothing is published.

        Args:
            engine: keyword arguments of ``LLM``.

        Raises:
            ValueError: an unknown key, an invalid value, no pyzmq, or no prefix caching.
        """
        if self.kv_events_config is None:
            return None
        from ..serving.engine_process.kv_events import KvEventsConfig

        values = json_object("--kv-events-config", self.kv_events_config)
        try:
            config = KvEventsConfig.from_dict(values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--kv-events-config: {error}") from error
        if not config.publishes:
            return None
        if not engine.get("enable_prefix_caching", True):
            raise ValueError("--kv-events-config needs prefix caching; leave out --no-enable-prefix-caching")
        if importlib.util.find_spec("zmq") is None:
            raise ValueError("--kv-events-config needs pyzmq; install it: pip install 'torch-pagoda[kv-events]'")
        return values


def make_settings(
    model: str, own: ServeOptions, settings: Mapping[str, Any], engine: Mapping[str, Any], version: str
) -> Settings:
    """The server's settings.

    Args:
        model: the argument MODEL.
        own: options of this command only.
        settings: fields of ``Settings`` that are options.
        engine: keyword arguments of ``LLM``; they are part of the fingerprint.
        version: of this software.

    Raises:
        ValueError: an option or a file is invalid.
    """
    kwargs, queue = own.default_chat_template_kwargs, settings["max_queue"]
    return Settings(
        **{
            **settings,
            "max_queue": own.max_num_queued_reqs if queue is None else queue,
            "served_model_names": served_names(model, own.served_model_name),
            "api_keys": api_keys(own.api_key or (), own.api_key_file, os.environ.get(KEY_VARIABLE)),
            "chat_template": None if own.chat_template is None else read_text("--chat-template", own.chat_template),
            "chat_template_kwargs": {} if kwargs is None else json_object("--default-chat-template-kwargs", kwargs),
            "enable_ui": not own.no_ui,
            "system_fingerprint": _fingerprint(version, model, engine),
            "version": version,
        }
    )


def served_names(model: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """Model names for clients: the given ones, else the folder's name and the argument MODEL."""
    if given:
        return tuple(dict.fromkeys(given))
    name = Path(model).resolve().name if Path(model).is_dir() else model
    return tuple(dict.fromkeys((name, model))) if len(model) <= 256 else (name,)


def api_keys(given: Sequence[str], file: Path | None, variable: str | None) -> tuple[ApiKey, ...]:
    """API keys from ``--api-key``, from a file with one per line, and from the environment.

    Each is ``KEY`` or ``NAME=KEY``.

    Raises:
        ValueError: the file could not be read.
    """
    entries = [entry for entry in (*given, variable or "") if entry]
    if file is not None:
        lines = (line.strip() for line in read_text("--api-key-file", file).splitlines())
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {file} has no keys; write one per line")
        entries += found
    keys = []
    for number, entry in enumerate(entries, 1):
        named = _NAMED_KEY.fullmatch(entry)
        keys.append(ApiKey(named[1], named[2]) if named else ApiKey(f"key{number}", entry))
    return tuple(keys)


def _fingerprint(version: str, model: str, engine: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(repr((version, model, sorted(engine.items()))).encode()).hexdigest()
    return f"fp_{digest[:12]}"
